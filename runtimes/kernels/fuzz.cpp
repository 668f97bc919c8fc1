// Feeds the operators graphs and passes made of random bytes: right ones, with errors here and there. libFuzzer
// chooses the bytes, under checks of addresses and of undefined behaviour; needs no ONNX Runtime.
// `python -m tools.kernel_check --fuzz SECONDS` builds and runs it. Every input runs on the plain set and on
// another, whose outputs must have the same bits: so what a pass does not write is found too. At the end it
// prints how often each refusal was given.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "kernels.h"
#include "stand_in.h"

namespace {

using namespace stand_in;
using edgespec::Cells;
using edgespec::kFormatCount;
using edgespec::kFormats;
using edgespec::kScaled;
using edgespec::ort::kFloat;
using edgespec::ort::kFloat16;
using edgespec::ort::kInt64;
using edgespec::ort::kUint8;

// The input as choices. Where it ends, or is zeros, a choice is the usual one. The first byte says how seldom others
// are, or the second which one is the only other: graphs with one error get farther than those with several.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size)
      : data_(data), end_(data + size), rare_(static_cast<uint8_t>(255 - byte() / 4)), only_(byte()) {}

  uint8_t byte() { return data_ < end_ ? *data_++ : 0; }
  int64_t below(int n) { return byte() % n; }
  bool rarely() { return only_ > 0 ? ++asked_ == only_ : byte() >= rare_; }
  int64_t number(int64_t usual) {
    if (!rarely()) return usual;
    constexpr int64_t strange[] = {0, 1, -1, 16, 1 << 20, 1 << 28, (int64_t{1} << 31) - 1, int64_t{1} << 31,
                                   int64_t{1} << 60, int64_t{1} << 62, INT64_MAX, INT64_MIN};
    const int64_t at = below(16);
    if (at < 12) return strange[at];
    return at < 14 ? usual + static_cast<int8_t>(byte()) : static_cast<int64_t>(word());
  }
  uint64_t word() {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value = value << 8 | byte();
    return value;
  }

 private:
  const uint8_t *data_, *end_;
  uint8_t rare_, only_;
  int asked_ = 0;
};

struct Impossible {};  // what ONNX Runtime would refuse itself

// A tensor of `shape`, or another, with numbers of some size, of any bits, or with some that are none.
Value made(Choices& choices, int type, Shape shape) {
  for (int64_t& dimension : shape) dimension = choices.number(dimension);
  if (choices.rarely()) shape.push_back(choices.below(3));
  if (choices.rarely() && !shape.empty()) shape.erase(shape.begin());
  if (choices.rarely()) type = choices.below(2) ? kFloat : kUint8;
  Value value = tensor(type, shape);
  if (value == nullptr) throw Impossible();
  const uint8_t kind = choices.byte();
  uint64_t state = kind;
  for (size_t i = 0; i < value->bytes.size(); i += 4) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto bits = static_cast<uint32_t>(state >> 32);
    const float real = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f;
    uint32_t word = bits;
    if (type == kFloat && kind % 4 < 3) std::memcpy(&word, &real, sizeof word);
    if (type == kFloat && kind % 4 == 1 && bits % 64 == 0) word = 0x7fc00000;
    std::memcpy(value->bytes.data() + i, &word, std::min<size_t>(4, value->bytes.size() - i));
  }
  return value;
}

// Adds the node's next input, or leaves it out.
void add(Choices& choices, OrtKernelInfo& node, const Shape& shape, bool present = true) {
  const size_t index = std::min(node.inputs.size(), node.op->get_input_count(node.op) - 1);
  node.inputs.push_back(present ? made(choices, node.op->get_input_type(node.op, index), shape) : nullptr);
}

void set_numbers(OrtKernelInfo& node, size_t index, const std::vector<int64_t>& numbers) {
  std::vector<uint8_t>& bytes = node.inputs[index]->bytes;
  const size_t size = std::min(bytes.size(), numbers.size() * sizeof(int64_t));
  if (size > 0) std::memcpy(bytes.data(), numbers.data(), size);
}

std::string broken(Choices& choices, std::string value) {
  if (choices.rarely()) value.resize(static_cast<size_t>(choices.below(static_cast<int>(value.size()) + 1)));
  if (choices.rarely()) value += static_cast<char>(choices.byte());
  if (choices.rarely() && !value.empty()) value[choices.byte() % value.size()] = static_cast<char>(choices.byte());
  return value;
}

int64_t size_of(int64_t format, int64_t columns, int64_t inputs) {
  return (columns + 15) / 16 * (inputs / kFormats[format].inputs) * kFormats[format].bytes;
}

void fill_linear(Choices& choices, OrtKernelInfo& node) {
  const int64_t inputs = 256 * (1 + choices.below(2)), rows = 1 + choices.below(12);
  const char* const gates[] = {"", "silu", "gelu", "squared", "xielu"};
  const int gate_number = choices.below(5);
  const std::string gate = gates[gate_number];
  const bool alone = gate_number % 3 == 0 || gate_number == 4;
  const int64_t own = 1 + choices.below(3), count = alone || choices.rarely() ? own : 2 * own;
  int64_t columns[3], width = 0;
  for (int64_t i = 0; i < own; i++) width += columns[i] = 1 + choices.below(40);
  const Shape shapes[] = {{1, rows, inputs}, {inputs}, {width}, {width}, {1, rows, width}};
  const uint8_t present = choices.byte();
  for (int i = 0; i < 5; i++) add(choices, node, shapes[i], i == 0 || present >> i & 1);
  std::string parts;
  for (int64_t i = 0; i < count; i++) {
    const int64_t format = choices.below(kFormatCount);
    parts += (i ? "," : "") + std::string(kFormats[format].name) + ":";
    parts += std::to_string(choices.number(columns[i % own]));
    add(choices, node, {size_of(format, columns[i % own], inputs)});
  }
  if (choices.rarely()) node.inputs.push_back(node.inputs.back());
  if (choices.rarely()) node.inputs.pop_back();
  node.numbers = {{"inputs", choices.number(inputs)}};
  node.reals = {{"epsilon", choices.rarely() ? NAN : 1e-5f}};
  for (const char* name : {"above", "below", "slope"})
    if (gate == "xielu") node.reals[name] = choices.rarely() ? NAN : static_cast<float>(choices.below(9)) * 0.25f;
  node.texts = {{"gate", broken(choices, gate)}, {"parts", broken(choices, parts)}};
}

// Passes over sequences behind tokens, and the blocks of each: mostly in turn, of more than there are needed.
struct Tables {
  std::vector<int64_t> sequences, blocks;

  void add(Choices& choices, int64_t past, int64_t rows, int64_t count) {
    for (const int64_t number : {past, rows}) sequences.push_back(choices.number(number));
    for (int64_t i = (past + rows + 31) / 32; i > 0; i--)
      blocks.push_back(choices.number(static_cast<int64_t>(blocks.size()) % count));
  }
  int64_t size() const { return static_cast<int64_t>(blocks.size()); }
};

template <Cells kCells = Cells::halves>
void fill_attention(Choices& choices, OrtKernelInfo& node) {
  const int64_t kv_heads = 1 + choices.below(3), heads = kv_heads * (1 + choices.below(3));
  const bool halves = kCells == Cells::halves, latent = halves && kv_heads == 1 && choices.below(2);
  int64_t head_dim = latent ? 16 * (1 + choices.below(4)) : 2 + choices.below(70);
  if (!halves) head_dim = kScaled * (1 + choices.below(3));
  const int64_t value_dim = latent ? head_dim - 2 * (1 + choices.below(7)) : head_dim;
  const int64_t rows = 1 + choices.below(20), past = choices.below(120);
  const int64_t half = (latent ? head_dim - value_dim : head_dim) / (choices.below(2) ? 4 : 2);
  const int64_t sequences = 1 + choices.below(3), count = 8 * (1 + choices.below(2));
  Tables tables;
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < sequences; i++) {
    lengths.push_back(i == 0 ? past : choices.below(static_cast<int>(past) + 1));
    tables.add(choices, lengths.back(), rows, count);
  }
  const auto cache = [&](int64_t bytes) { return Shape{count / 8, kv_heads, 256, halves ? bytes / 2 : bytes}; };
  const Shape keys = cache(key_bytes(kCells, head_dim)), values = cache(value_bytes(kCells, head_dim));
  const bool row_tables = choices.below(4) == 0, ends = choices.below(4) == 0;  // ends of what rows see, behind them
  const int64_t turns = row_tables ? sequences * rows : past + rows + choices.below(2);
  const Shape rotation = {choices.number(turns), choices.number(half)};
  // Queries, keys and values; with gates; queries and keys; queries alone.
  const int64_t packed[] = {heads + 2 * kv_heads, 2 * (heads + kv_heads), heads + kv_heads, heads};
  const bool injects = choices.below(2) != 0 && (!(row_tables || latent) || choices.below(8) == 0);
  const int64_t injected = injects ? choices.below(static_cast<int>(rows) + 1) : 0;
  const Shape shapes[] = {{1, sequences * (rows - injected), packed[latent ? 2 : choices.below(4)] * head_dim}, keys, values,
                          {sequences, 2}, {choices.number(tables.size())}, rotation, rotation, {value_dim}, {value_dim},
                          {heads}, {1, sequences * injected, choices.number(2 * kv_heads * head_dim)}, {sequences},
                          {choices.number(sequences * (rows - injected))}, {kv_heads * head_dim}};
  const uint8_t left_out = choices.byte();
  const bool sizes = choices.below(2) != 0;
  const auto present = [&](int i) {
    if (i < 5) return !(latent && i == 2);
    if (i < 12) return !(left_out >> (i - 5) & 1) && (i < 10 || injected > 0);
    return i == 12 ? ends : sizes;
  };
  const int last = sizes ? 14 : ends ? 13 : injected > 0 ? 12 : 10;
  for (int i = 0; i < last; i++) add(choices, node, shapes[i], present(i));
  set_numbers(node, 3, tables.sequences);
  set_numbers(node, 4, tables.blocks);
  const std::vector<int64_t> counts(static_cast<size_t>(sequences), choices.number(injected));
  if (injected > 0 && node.inputs[11]) set_numbers(node, 11, counts);
  std::vector<int64_t> row_ends;
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t seen = choices.below(static_cast<int>(rows) + 1);
    for (int64_t r = injected; r < rows; r++)
      row_ends.push_back(choices.number(lengths[static_cast<size_t>(i)] + (r < seen ? seen : r + 1)));
  }
  if (ends) set_numbers(node, 12, row_ends);
  node.in_place = choices.below(2) == 0;
  node.numbers = {{"heads", choices.number(heads)}, {"kv_heads", choices.number(kv_heads)},
                  {"head_dim", choices.number(head_dim)}, {"interleaved", choices.below(2)},
                  {"window", choices.number(choices.below(2) ? choices.below(64) : 0)}};
  node.reals = {{"scale", choices.below(2) ? 0.25f : 1.0f}, {"epsilon", 1e-5f}};
  if (latent) node.numbers["value_dim"] = choices.number(value_dim);
  if (!halves && choices.rarely()) node.numbers["value_dim"] = 16;
  if (!latent && choices.below(2)) node.numbers["pair_distance"] = choices.number(head_dim / 2);
  if (!latent && choices.below(2)) node.numbers["normed_values"] = 1;
  if (choices.below(2) && (!ends || choices.below(8) == 0)) node.numbers["bidirectional"] = 1;
  if (row_tables) node.numbers["row_tables"] = 1;
  if (choices.below(2) && (!latent || choices.below(8) == 0)) node.numbers["normed_last"] = 1;
  if (choices.below(2)) node.numbers["growth_step"] = choices.number(1 + choices.below(40));
  if (choices.below(2)) node.reals["growth"] = choices.rarely() ? NAN : 0.1f;
  if (choices.below(2)) node.reals["cap"] = choices.rarely() ? NAN : 5.0f;
}

// Counts of rows, and places of states that may be behind them.
void set_sequences(Choices& choices, OrtKernelInfo& node, int64_t sequences, int64_t slots, int64_t rows) {
  std::vector<int64_t> counts, places;
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t past = choices.byte();
    counts.insert(counts.end(), {choices.number(past), choices.number(rows)});
    places.push_back(choices.number(choices.rarely() ? slots - 1 : slots - 1 - i));
    places.push_back(choices.number(past - choices.byte() % (std::min<int64_t>(past, 16) + 1)));
  }
  set_numbers(node, 4, counts);
  set_numbers(node, 5, places);
  node.in_place = choices.below(2) == 0;
}

void fill_mamba(Choices& choices, OrtKernelInfo& node) {
  const int64_t groups = 1 + choices.below(2), heads = groups * (1 + choices.below(3));
  const int64_t width = 16 * (1 + choices.below(2)), key_width = 16 * (1 + choices.below(2));
  const int64_t keys = groups * key_width, values = heads * width, channels = values + 2 * keys;
  const int64_t sequences = 1 + choices.below(2), slots = sequences + choices.below(2), taps = 1 + choices.below(5);
  const int64_t rows = choices.below(40);
  const Shape shapes[] = {{1, sequences * rows, values + channels + heads},
                          {slots, heads, width / 16, key_width, 16},
                          {slots, 16, keys + values + heads},
                          {slots, 15 + taps, channels},
                          {sequences, 2},
                          {sequences, 2},
                          {taps, channels},
                          {channels},
                          {heads},
                          {heads},
                          {heads},
                          {values}};
  for (const Shape& shape : shapes) add(choices, node, shape);
  set_sequences(choices, node, sequences, slots, rows);
  node.numbers = {{"heads", choices.number(heads)}, {"width", choices.number(width)},
                  {"groups", choices.number(groups)}, {"key_width", choices.number(key_width)}};
  node.reals = {{"epsilon", 1e-5f}};
}

void fill_delta(Choices& choices, OrtKernelInfo& node) {
  const int64_t key_heads = 1 + choices.below(2), value_heads = key_heads * (1 + choices.below(3));
  const int64_t key_width = 16 * (1 + choices.below(2)), value_width = 16 * (1 + choices.below(2));
  const int64_t keys = key_heads * key_width, values = value_heads * value_width, channels = 2 * keys + values;
  const int64_t sequences = 1 + choices.below(2), slots = sequences + choices.below(2), taps = 1 + choices.below(5);
  const int64_t rows = choices.below(40);
  const Shape shapes[] = {{1, sequences * rows, channels + values + 2 * value_heads},
                          {slots, value_heads, value_width / 16, key_width, 16},
                          {slots, 16, keys + values + value_heads},
                          {slots, 15 + taps, channels},
                          {sequences, 2},
                          {sequences, 2},
                          {taps, channels},
                          {value_heads},
                          {value_heads},
                          {value_width}};
  for (const Shape& shape : shapes) add(choices, node, shape);
  set_sequences(choices, node, sequences, slots, rows);
  node.numbers = {{"key_heads", choices.number(key_heads)}, {"value_heads", choices.number(value_heads)},
                  {"key_width", choices.number(key_width)}, {"value_width", choices.number(value_width)},
                  {"tiled", choices.below(2)}};
  node.reals = {{"epsilon", 1e-6f}};
}

void fill_convolution(Choices& choices, OrtKernelInfo& node) {
  const int64_t taps = 2 + choices.below(4), channels = 16 * (1 + choices.below(20)), rows = 1 + choices.below(40);
  const int64_t past = choices.below(80), sequences = 1 + choices.below(3), count = 1 + choices.below(12);
  Tables tables;
  std::vector<int64_t> places;
  for (int64_t i = 0; i < sequences; i++) {
    const int64_t before = i == 0 ? past : choices.below(static_cast<int>(past) + 1);
    tables.add(choices, before, rows, count);
    places.push_back(choices.number(sequences - 1 - i));
    places.push_back(choices.number(before - choices.below(static_cast<int>(std::min<int64_t>(before, 16)) + 1)));
  }
  const Shape shapes[] = {{1, sequences * rows, 3 * channels},
                          {sequences + choices.below(2), 15 + taps, channels},
                          {count, taps - 1, channels},
                          {sequences, 2},
                          {choices.number(tables.size())},
                          {sequences, 2},
                          {taps, channels}};
  for (const Shape& shape : shapes) add(choices, node, shape);
  set_numbers(node, 3, tables.sequences);
  set_numbers(node, 4, tables.blocks);
  set_numbers(node, 5, places);
  node.in_place = choices.below(2) == 0;
  node.numbers = {{"channels", choices.number(channels)}, {"taps", choices.number(taps)}};
}

// Tokens of a vocabulary, and its table.
int64_t add_lookup(Choices& choices, OrtKernelInfo& node, int64_t width) {
  const int64_t format = choices.below(kFormatCount), rows = 1 + choices.below(50);
  std::vector<int64_t> tokens(static_cast<size_t>(choices.below(6)));
  for (int64_t& token : tokens) token = choices.number(choices.byte() % rows);
  const auto count = static_cast<int64_t>(tokens.size());
  for (const Shape& shape : {Shape{1, count}, Shape{size_of(format, rows, width)}}) add(choices, node, shape);
  set_numbers(node, 0, tokens);
  node.numbers = {{"width", choices.number(width)}, {"rows", choices.number(rows)}};
  node.reals = {{"factor", 0.5f}, {"epsilon", 1e-5f}};
  node.texts = {{"format", broken(choices, kFormats[format].name)}};
  return count;
}

void fill_embedding(Choices& choices, OrtKernelInfo& node) { add_lookup(choices, node, 256); }

void fill_layer_inputs(Choices& choices, OrtKernelInfo& node) {
  const int64_t part = 32 * (1 + choices.below(8)), width = 256 * (1 + choices.below(2));
  const int64_t count = add_lookup(choices, node, width);
  for (const Shape& shape : {Shape{1, count, width}, Shape{part}}) add(choices, node, shape);
  node.numbers["part"] = choices.number(part);
}

void fill_input_gate(Choices& choices, OrtKernelInfo& node) {
  const int64_t layers = 1 + choices.below(4), part = 1 + choices.below(70), rows = choices.below(7);
  for (const int64_t width : {part, layers * part}) add(choices, node, {1, rows, width});
  node.numbers = {{"layer", choices.number(choices.below(static_cast<int>(layers)))}};
  node.texts = {{"gate", broken(choices, choices.below(2) ? "gelu" : "silu")}};
}

void fill_logits(Choices& choices, OrtKernelInfo& node) {
  const int64_t columns = choices.rarely() ? 8000 + 2 * choices.byte() : 1 + choices.byte();
  add(choices, node, {1, choices.below(9), columns});
  node.reals = {{"most", choices.rarely() ? 0.0f : 0.5f}};
}

void fill_experts(Choices& choices, OrtKernelInfo& node) {
  const int64_t experts = 1 + choices.below(6), used = 1 + choices.below(static_cast<int>(experts));
  const int64_t inputs = 256, width = 32 * (1 + choices.below(3)), rows = choices.below(7);
  const int64_t scored = experts + choices.below(2);
  const Shape shapes[] = {{1, rows, inputs}, {inputs},  {1, rows, inputs},    {1, rows, inputs}, {scored, inputs},
                          {experts},         {2, experts, width}, {experts, inputs}, {experts}};
  const uint8_t left_out = choices.byte();
  for (int i = 0; i < 9; i++) {
    const bool wanted = i == 0 || i == 4 || (i == 3 && scored > experts) || (left_out >> i & 1) == 0;
    add(choices, node, shapes[i], wanted != choices.rarely());
  }
  const char* const gates[] = {"silu", "gelu", "clamped", "squared"};
  const std::string gate = gates[choices.below(4)];
  std::string formats;
  for (int i = 0; i < 3; i++) {
    if (i == 0 && gate == "squared") {
      add(choices, node, {}, choices.rarely());
      continue;
    }
    int64_t format = choices.below(kFormatCount);
    if (i == 2 && kFormats[format].inputs > 32) format = 0;
    formats += (formats.empty() ? "" : ",") + std::string(kFormats[format].name);
    add(choices, node, {size_of(format, experts * (i < 2 ? width : inputs), i < 2 ? inputs : width)});
  }
  const uint8_t added = choices.byte();
  for (int i = 0; i < 4; i++) add(choices, node, {i == 1 ? experts : inputs}, added >> i & 1);
  node.numbers = {{"inputs", choices.number(inputs)}, {"width", choices.number(width)},
                  {"experts", choices.number(experts)}, {"used", choices.number(used)}, {"normalized", choices.below(2)}};
  node.reals = {{"epsilon", 1e-5f}, {"scale", choices.below(2) ? 1.0f : 2.5f}};
  node.texts = {{"gate", broken(choices, gate)}, {"formats", broken(choices, formats)},
                {"gating", broken(choices, choices.below(2) ? "softmax" : "sigmoid")}};
}

void fill_clusters(Choices& choices, OrtKernelInfo& node) {
  const int64_t clusters = 1 + choices.below(5), columns = clusters * 16 * (1 + choices.below(3));
  const int64_t rows = choices.below(4), format = choices.below(kFormatCount), inputs = 256;
  std::vector<int64_t> tokens(static_cast<size_t>(columns));
  for (int64_t i = 0; i < columns; i++) tokens[static_cast<size_t>(i)] = columns - 1 - i;
  if (choices.rarely()) tokens[0] = choices.byte();
  const Shape shapes[] = {{1, rows, inputs}, {1, rows, clusters}, {columns}, {size_of(format, columns, inputs)}};
  for (const Shape& shape : shapes) add(choices, node, shape);
  set_numbers(node, 2, tokens);
  node.numbers = {{"inputs", choices.number(inputs)}, {"clusters", choices.number(clusters)},
                  {"read", choices.number(1 + choices.below(static_cast<int>(clusters)))}};
  node.texts = {{"format", broken(choices, kFormats[format].name)}};
}

void fill_head_linear(Choices& choices, OrtKernelInfo& node) {
  const int64_t format = choices.below(kFormatCount), heads = 1 + choices.below(4), outputs = 16 * (1 + choices.below(3));
  const int64_t inputs = 256 * (1 + choices.below(2)), rows = choices.below(60);
  add(choices, node, {1, rows, heads * (inputs + choices.below(20))});
  add(choices, node, {size_of(format, heads * outputs, inputs)});
  node.numbers = {{"heads", choices.number(heads)}, {"inputs", choices.number(inputs)},
                  {"width", choices.number(outputs)}};
  node.texts = {{"format", broken(choices, kFormats[format].name)}};
}

void fill_head_gate(Choices& choices, OrtKernelInfo& node) {
  const int64_t heads = choices.below(20), head_dim = choices.below(70), rows = choices.below(12);
  for (const int64_t width : {heads * head_dim, heads}) add(choices, node, {1, rows, width});
  if (choices.below(2)) node.numbers["softplus"] = 1;
}

void fill_full_attention(Choices& choices, OrtKernelInfo& node) {
  const int64_t heads = 1 + choices.below(3), head_dim = 1 + choices.below(33), rows = 3 * choices.below(200);
  for (int i = 0; i < 3; i++) add(choices, node, {1, rows, heads * head_dim});
  node.numbers = {{"heads", choices.number(heads)}};
  node.reals = {{"scale", choices.rarely() ? NAN : 0.25f}};
}

constexpr std::pair<std::string_view, void (*)(Choices&, OrtKernelInfo&)> kFill[] = {
    {"Linear", fill_linear}, {"Attention", fill_attention<>}, {"FullAttention", fill_full_attention},
    {"Attention8", fill_attention<Cells::bytes>}, {"Embedding", fill_embedding}, {"Choose", fill_logits},
    {"Delta", fill_delta}, {"Mamba", fill_mamba}, {"ShortConv", fill_convolution}, {"Experts", fill_experts},
    {"LayerInputs", fill_layer_inputs}, {"InputGate", fill_input_gate}, {"Cap", fill_logits},
    {"Clusters", fill_clusters}, {"HeadGate", fill_head_gate}, {"HeadLinear", fill_head_linear}};

// A node of one of the operators, and the set of instructions that runs it besides the plain set.
OrtKernelInfo node_of(const uint8_t* data, size_t size, const Operators& operators, size_t* number, std::string* set) {
  const char* const sets[] = {"avx512", "avxvnni", "avx2", "neon_i8mm", "neon_dot", "plain"};
  Choices choices(data, size);
  OrtKernelInfo node;
  *number = choices.byte() % operators.size();
  node.op = operators[*number];
  *set = sets[choices.below(6)];
  for (const auto& [name, fill] : kFill)
    if (name == node.op->get_name(node.op)) fill(choices, node);
  if (node.inputs.empty()) std::abort();  // an operator that nothing fills
  node.constants = node.inputs;
  if (choices.rarely()) node.constants[choices.byte() % node.constants.size()] = nullptr;
  node.alone = choices.rarely();
  if (choices.rarely()) node.numbers.erase("inputs");
  if (choices.rarely()) node.texts.erase("parts");
  if (choices.rarely()) node.texts.erase("formats");
  return node;
}

// ---- Running -----------------------------------------------------------------------------------------------

uint64_t inputs = 0, accepted = 0;
std::map<std::string, uint64_t> refusals;

void report() {
  std::printf("%llu graphs, %llu of them accepted\n", static_cast<unsigned long long>(inputs),
              static_cast<unsigned long long>(accepted));
  for (const auto& [message, count] : refusals)
    std::printf("%12llu  %s\n", static_cast<unsigned long long>(count), message.c_str());
}

// Operators of a set of instructions, with huge pages or without; null where the processor lacks it.
const OrtCustomOpDomain* domain(const std::string& set, bool huge) {
  static auto& known = *new std::map<std::string, OrtCustomOpDomain*>;  // never freed, as the operators
  const auto [at, missing] = known.try_emplace(set + (huge ? "+" : ""), nullptr);
  if (!missing) return at->second;
  OrtSessionOptions options;
  options.settings["edgespec.instructions"] = set;
  options.settings["edgespec.threads"] = huge ? "3" : "1";
  if (huge) options.settings["edgespec.huge_pages"] = "all";
  const edgespec::ort::ApiBase base = {[](uint32_t) -> const void* const* { return table; }, nullptr};
  delete RegisterCustomOps(&options, &base);
  return at->second = options.domain;
}

// Whether it ended well; why not is counted once for an input.
bool good(OrtStatus* status, bool counted) {
  if (status == nullptr) return true;
  std::string message = status->message;
  delete status;
  if (message.rfind("edgespec: ", 0) != 0 && message.rfind("stand-in: ", 0) != 0) std::abort();
  const size_t name = message.find("is called ");
  refusals[name == std::string::npos ? message : message.substr(0, name + 9)] += counted;
  return false;
}

// Which NaN an operation gives is up to the processor, so all are one.
void add_bits(const OrtValue& value, std::vector<uint32_t>& bits) {
  const bool is_real = value.type == kFloat || value.type == kFloat16;
  const size_t size = value.type == kFloat16 ? 2 : 4;
  const uint32_t infinity = size == 2 ? 0x7c00 : 0x7f800000, sign = size == 2 ? 0x8000 : 0x80000000;
  for (size_t i = 0; i + size <= value.bytes.size(); i += size) {
    uint32_t word = 0;
    std::memcpy(&word, value.bytes.data() + i, size);
    const bool nothing = is_real && (word & ~sign) > infinity;
    bits.push_back(nothing ? infinity + 1 : word);
  }
}

// Outputs as bits; nothing where graph or pass were refused.
std::vector<uint32_t> run(const uint8_t* data, size_t size, bool plain) {
  std::string set;
  size_t number = 0;
  const OrtKernelInfo node = node_of(data, size, domain("plain", false)->operators, &number, &set);
  const OrtCustomOpDomain* library = domain(plain ? "plain" : set, !plain && size % 32 == 0);
  if (library == nullptr) library = domain("", false);
  const edgespec::ort::CustomOp* op = library->operators[number];
  OrtKernelContext context{node, plain ? uint8_t{0x55} : uint8_t{0xaa}, {}};
  void* kernel = nullptr;
  std::vector<uint32_t> bits;
  if (!good(op->create_kernel_v2(op, nullptr, &node, &kernel), plain)) return bits;
  const bool ran = good(op->compute_v2(kernel, reinterpret_cast<OrtKernelContext*>(&context)), plain);
  op->destroy(kernel);
  if (!ran) return bits;
  bits.push_back(1);
  for (const Value& output : context.outputs)
    if (output != nullptr) add_bits(*output, bits);
  return bits;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  fill_table();
  return std::atexit(report);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::vector<uint32_t> expected = run(data, size, true);
    inputs++;
    accepted += !expected.empty();
    if (run(data, size, false) != expected) {
      std::fprintf(stderr, "the plain set computes other bits\n");
      std::abort();
    }
  } catch (const Impossible&) {
  }
  return 0;
}
