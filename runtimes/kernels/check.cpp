// Runs every instruction set that this processor has on the same numbers, compares the bits with those of
// the plain set, and prints a digest of them, which has to be the same on every machine. Needs no ONNX
// Runtime. Returns 1 where bits differ.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "crew.h"
#include "kernels.h"

namespace edgespec {
namespace {

constexpr const char* kSets[] = {"plain", "avx2", "avxvnni", "avx512", "neon_dot", "neon_i8mm"};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNothing = std::numeric_limits<float>::quiet_NaN();

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>(z >> 32);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
  float real() { return static_cast<float>(static_cast<int32_t>(bits()) >> 8) * 0x1p-23f; }  // -1 to 1

  // Reals of sizes that differ from one 16 to the next; some 16 are zeros.
  std::vector<float> reals(int64_t count, float most = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    float size = 0.0f;
    for (size_t i = 0; i < values.size(); i++) {
      if (i % 16 == 0) size = below(9) == 0 ? 0.0f : most / static_cast<float>(1 << below(6));
      values[i] = real() * size;
    }
    return values;
  }

 private:
  uint64_t state_;
};

// What a case computes, as bits. Which NaN an operation gives is up to the processor, so all are one.
class Results {
 public:
  void add(float value) {
    uint32_t word = 0x7fc00000u;
    if (value == value) std::memcpy(&word, &value, sizeof word);
    words_.push_back(word);
  }
  void add(int64_t value) {
    words_.push_back(static_cast<uint32_t>(value));
    words_.push_back(static_cast<uint32_t>(value >> 32));
  }
  void add(const std::vector<float>& values) {
    for (const float value : values) add(value);
  }
  const std::vector<uint32_t>& words() const { return words_; }

 private:
  std::vector<uint32_t> words_;
};

struct Case {
  std::string name;
  std::function<void(const Kernels&, Random&, Results&)> run;
};
using Cases = std::vector<Case>;

std::string text(const char* name, int64_t number) { return std::string(name) + " " + std::to_string(number); }

// ---- Normalization and rounding ------------------------------------------------------------------------

void add_normalizations(Cases& cases) {
  for (const int64_t width : {1, 7, 16, 64, 100, 1000})
    cases.push_back({text("normalize", width), [=](const Kernels& kernels, Random& random, Results& results) {
                       std::vector<float> x = random.reals(width, 8.0f), y(x.size());
                       const std::vector<float> gain = random.reals(width);
                       kernels.normalize(x.data(), gain.data(), 1e-6f, width, y.data());
                       results.add(y);
                       kernels.normalize(x.data(), gain.data(), 1e-6f, width, x.data());
                       results.add(x);
                     }});
}

void add_roundings(Cases& cases) {
  const auto add = [&](const std::string& name, float most, float strange) {
    cases.push_back({name, [=](const Kernels& kernels, Random& random, Results& results) {
                       std::vector<float> x = random.reals(32 * kBlock, most);
                       if (strange != 0.0f) x[100] = strange;
                       std::vector<Activations> y(32);
                       results.add(kernels.quantize(x.data(), static_cast<int64_t>(x.size()), y.data(), 1));
                       for (const Activations& block : y) {
                         for (const int8_t code : block.codes) results.add(int64_t{code});
                         for (int half = 0; half < 2; half++) {
                           results.add(int64_t{block.scales[half]});
                           results.add(int64_t{block.twice[half]});
                           results.add(block.floats[half]);
                           results.add(int64_t{block.negated_sums[half]});
                           for (const int16_t sum : block.negated_pairs[half]) results.add(int64_t{sum});
                         }
                         results.add(block.negated_sum);
                       }
                     }});
  };
  for (const float most : {1.0f, 1e4f, 3e38f, 1e-20f, 1e-29f, 1e-36f, 1e-40f})
    add("quantize up to " + std::to_string(most), most, 0.0f);
  add("quantize with infinity", 1.0f, kInfinity);
  add("quantize with NaN", 1.0f, kNothing);
}

// ---- Products ------------------------------------------------------------------------------------------

#define EDGESPEC_FACTORS(name) Tile<name>::kFactorAt,
constexpr int kFactorsAt[] = {EDGESPEC_FORMATS(EDGESPEC_FACTORS)};
#define EDGESPEC_EXPONENTS(name) Tile<name>::kExponents,
constexpr bool kExponents[] = {EDGESPEC_FORMATS(EDGESPEC_EXPONENTS)};

struct Matrix {
  std::vector<uint8_t> tiles;
  Part part;

  // Random codes and scales; float16 factors below 64, and powers of two up to 32, small ones without the
  // leading 1 among them.
  Matrix(Random& random, int format, int64_t columns, int64_t inputs) : part{nullptr, columns, format} {
    const FormatInfo& info = kFormats[format];
    tiles.resize(static_cast<size_t>(part.tile_count() * (inputs / info.inputs) * info.bytes));
    part.tiles = tiles.data();
    for (size_t i = 0; i < tiles.size(); i++) {
      const uint32_t bits = random.bits();
      const bool factor = static_cast<int>(i) % info.bytes >= kFactorsAt[format];
      tiles[i] = static_cast<uint8_t>(bits);
      if (factor && kExponents[format]) tiles[i] = (bits >> 8) % (bits % 5 ? 14 : 4) + (bits % 5 ? 120 : 0);
      if (factor && !kExponents[format] && i % 2 == 1) tiles[i] = (bits & 0x83) | (bits >> 8) % 21 << 2;
    }
  }
};

constexpr int64_t kInputs = 768, kWide = 40, kNarrow = 24;

// Rows of activations, rounded.
struct Rounded {
  std::vector<Activations> activations;
  std::vector<float> factors;

  Rounded(const Kernels& kernels, const std::vector<float>& x, int64_t rows) {
    const int64_t inputs = static_cast<int64_t>(x.size()) / rows;
    activations.resize(x.size() / kBlock);
    for (int64_t r = 0; r < rows; r++)
      factors.push_back(kernels.quantize(x.data() + r * inputs, inputs, activations.data() + r, rows));
  }
};

// A product that nothing else is done to.
Projection product(const Part* parts, size_t count, const Rounded& x, std::vector<float>& y) {
  Projection p{};
  p.parts = parts;
  p.part_count = static_cast<int64_t>(count);
  p.rows = p.stride = static_cast<int64_t>(x.factors.size());
  p.inputs = static_cast<int64_t>(x.activations.size()) * kBlock / p.rows;
  p.width = static_cast<int64_t>(y.size()) / p.rows;
  p.activations = x.activations.data();
  p.factors = x.factors.data();
  p.y = y.data();
  return p;
}

// Two parts, or with a gate twice two, the first of `format`; tiles in two goes.
void project(const Kernels& kernels, Random& random, int format, Gate gate, int64_t rows, Results& results) {
  std::vector<Matrix> matrices;
  std::vector<Part> parts;
  for (int i = 0; i < (has_factor(gate) ? 4 : 2); i++) {
    matrices.emplace_back(random, i == 0 ? format : random.below(kFormatCount), i % 2 ? kNarrow : kWide, kInputs);
    parts.push_back(matrices.back().part);
  }
  const Rounded x(kernels, random.reals(rows * kInputs, 0.02f), rows);
  constexpr int64_t width = kWide + kNarrow;
  const std::vector<float> bias = random.reals(width), other = random.reals(width), residual = random.reals(rows * width);
  std::vector<float> y(static_cast<size_t>(rows * width));
  Projection p = product(parts.data(), parts.size(), x, y);
  p.gate = gate;
  p.bend = {0.8f, 0.7f, 0.5f};
  p.bias = rows % 2 ? bias.data() : nullptr;
  p.other_bias = rows % 2 ? other.data() : nullptr;
  p.residual = rows % 3 ? residual.data() : nullptr;
  kernels.project(p, 0, 2);
  kernels.project(p, 2, parts[0].tile_count() + parts[1].tile_count());
  results.add(y);
}

void add_products(Cases& cases) {
  const std::pair<Gate, const char*> gates[] = {
      {Gate::none, ""}, {Gate::silu, ", SiLU"}, {Gate::gelu, ", GELU"}, {Gate::clamped, ", clamped"},
      {Gate::squared, ", squared"}, {Gate::xielu, ", xIELU"}};
  for (int format = 0; format < kFormatCount; format++)
    for (const auto& [gate, called] : gates)
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 40, 50}) {
        std::string name = std::string("project ") + kFormats[format].name + called;
        cases.push_back({text((name + ", rows").c_str(), rows),
                         [=, gate = gate](const Kernels& kernels, Random& random, Results& results) {
                           project(kernels, random, format, gate, rows, results);
                         }});
      }
}

// Activations and codes as large as they get, where sums nearly leave the bits they are kept in.
void add_dots(Cases& cases) {
  for (const int64_t count : {1, 4, 7, 16})
    for (const int64_t rows : {1, 2, 5})
      cases.push_back({text(text("dots", count).c_str(), rows), [=](const Kernels& kernels, Random& random, Results& results) {
                         constexpr int64_t width = 96;
                         const std::vector<float> x = random.reals(rows * width), vectors = random.reals(count * width);
                         std::vector<float> y(static_cast<size_t>(rows * count));
                         kernels.dots(x.data(), rows, vectors.data(), count, width, y.data(), count);
                         results.add(y);
                       }});
}

void add_extremes(Cases& cases) {
  for (int format = 0; format < kFormatCount; format++)
    for (const int fill : {0, 255})
      cases.push_back({std::string("extremes of ") + kFormats[format].name,
                       [=](const Kernels& kernels, Random& random, Results& results) {
                         Matrix matrix(random, format, kLanes, kInputs);
                         for (size_t i = 0; i < matrix.tiles.size(); i++)
                           if (static_cast<int>(i) % kFormats[format].bytes < kFactorsAt[format])
                             matrix.tiles[i] = static_cast<uint8_t>(fill);
                         std::vector<float> x(2 * kInputs, 1.0f), y(2 * kLanes);
                         for (size_t i = kInputs; i < x.size(); i++) x[i] = -1.0f;
                         const Rounded rounded(kernels, x, 2);
                         kernels.project(product(&matrix.part, 1, rounded, y), 0, 1);
                         results.add(y);
                       }});
}

void add_gathers(Cases& cases) {
  for (int format = 0; format < kFormatCount; format++)
    cases.push_back({std::string("gather ") + kFormats[format].name,
                     [=](const Kernels& kernels, Random& random, Results& results) {
                       const Matrix matrix(random, format, kWide, kInputs);
                       std::vector<float> y(kInputs);
                       for (int64_t row = 0; row < kWide; row += 3) {
                         kernels.gather(matrix.part, kInputs, row, row % 2 ? 1.0f : 0.37f, y.data());
                         results.add(y);
                       }
                     }});
}

// ---- Attention -----------------------------------------------------------------------------------------

// Keys of `head_dim` numbers in a form.
std::vector<uint8_t> keys_of(Cells cells, const std::vector<float>& numbers, int64_t head_dim) {
  const int64_t row = key_bytes(cells, head_dim), tokens = static_cast<int64_t>(numbers.size()) / head_dim;
  std::vector<uint8_t> made(static_cast<size_t>(tokens * row));
  const auto put = [&](int64_t at, const auto& number) { std::memcpy(made.data() + at, &number, sizeof number); };
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t first = token / kLanes * kLanes * row, lane = token % kLanes;
    const float* x = numbers.data() + token * head_dim;
    int8_t codes[kScaled];
    for (int64_t d = 0; d < head_dim; d++) {
      if (cells == Cells::halves) {
        put(first + 2 * (d * kLanes + lane), narrow(x[d]));
        continue;
      }
      if (d % kScaled == 0)
        put(first + head_dim * kLanes + 2 * (d / kScaled * kLanes + lane), round_to_bytes(x + d, kScaled, codes));
      put(first + d / 4 * kLine + 4 * lane + d % 4, codes[d % kScaled]);
    }
  }
  return made;
}

std::vector<uint8_t> values_of(Cells cells, const std::vector<float>& numbers, int64_t head_dim) {
  const int64_t row = value_bytes(cells, head_dim), tokens = static_cast<int64_t>(numbers.size()) / head_dim;
  std::vector<uint8_t> made(static_cast<size_t>(tokens * row));
  const auto put = [&](int64_t at, const auto& number) { std::memcpy(made.data() + at, &number, sizeof number); };
  std::vector<int8_t> codes(static_cast<size_t>(head_dim));
  for (int64_t token = 0; token < tokens; token++) {
    const int64_t first = token / kTokens * kTokens * row, place = token % kTokens;
    const float* x = numbers.data() + token * head_dim;
    if (cells == Cells::bytes) put(first + head_dim * kTokens + 2 * place, round_to_bytes(x, head_dim, codes.data()));
    for (int64_t d = 0; d < head_dim; d++)
      if (cells == Cells::halves)
        put(token * row + 2 * d, narrow(x[d]));
      else
        put(first + d / kLanes * kLanes * kTokens + place / 4 * kLine + d % kLanes * 4 + place % 4,
            codes[static_cast<size_t>(d)]);
  }
  return made;
}

void add_narrowings(Cases& cases) {
  cases.push_back({"narrow", [](const Kernels&, Random&, Results& results) {
                     for (uint32_t high = 0x300 << 7; high < 0x500 << 7; high++)  // from 2^-31 to 2^33
                       for (const uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) {
                         const uint32_t bits = high << 13 | low;
                         float x;
                         std::memcpy(&x, &bits, sizeof x);
                         results.add(int64_t{narrow(x)} << 32 | narrow(-x));
                       }
                     for (const float x : {kInfinity, -kInfinity, kNothing, 3e38f, 1e-40f, 0.0f, -0.0f})
                       results.add(int64_t{narrow(x)});
                   }});
}

// Queries of `heads` heads and `rows` rows behind `past` tokens. Some bits of the plain set are those of each query alone.
struct Attended {
  Cells cells;
  int64_t head_dim, heads, rows, past, window;
  bool bidirectional;  // rows see those behind them, too
  int64_t value_dim;   // below head_dim, values are the first channels of keys
};

void attend(const Kernels& kernels, Random& random, const Attended& a, Results& results) {
  const int64_t tokens = a.past + a.rows, capacity = (tokens + kTokens - 1) / kTokens * kTokens;
  const int64_t count = a.heads * a.rows;
  const std::vector<float> vectors = random.reals(count * a.head_dim), sinks = random.reals(count, 8.0f);
  std::vector<float> key_numbers = random.reals(capacity * a.head_dim, 4.0f);
  std::vector<float> value_numbers =
      random.reals(capacity * a.head_dim, a.value_dim < a.head_dim ? 4.0f : 1.0f);
  for (int64_t i = tokens * a.head_dim; i < capacity * a.head_dim; i++)  // what lies there has no part in the answer
    key_numbers[static_cast<size_t>(i)] = value_numbers[static_cast<size_t>(i)] = kNothing;
  // Two blocks lie one behind the other and the third is the next extent's first, the last three before the others; the
  // rest is of nobody, and another head lies in each extent.
  const int64_t last = (tokens - 1) / kTokens;
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i <= last; i++) blocks.push_back(16 * (last / 3 - i / 3) + 6 + i % 3);
  const auto pool_of = [&](const std::vector<uint8_t>& numbers, const BlockTable& table) {
    const int64_t step = kTokens * table.row;
    std::vector<uint8_t> pool(static_cast<size_t>(32 * (last / 3 + 1) * step), 0xff);  // float16: not numbers
    for (size_t i = 0; i < numbers.size(); i++) {
      const auto at = static_cast<int64_t>(i), block = blocks[static_cast<size_t>(at / step)];
      pool[static_cast<size_t>((block / 8 * 16 + block % 8) * step + at % step)] = numbers[i];
    }
    return pool;
  };
  const BlockTable key_table = {blocks.data(), 2, key_bytes(a.cells, a.head_dim)};
  const BlockTable value_table = {blocks.data(), 2, value_bytes(a.cells, a.head_dim)};
  const std::vector<uint8_t> keys = pool_of(keys_of(a.cells, key_numbers, a.head_dim), key_table);
  const std::vector<uint8_t> values = pool_of(values_of(a.cells, value_numbers, a.head_dim), value_table);
  std::vector<Span> spans;
  for (int64_t i = 0; i < count; i++) {
    const int64_t end = a.past + i / a.heads + 1;
    spans.push_back({a.window > 0 && end > a.window ? end - a.window : 0, a.bidirectional ? tokens : end});
  }
  const auto run = [&](int64_t first, int64_t last) {
    std::vector<float> y(vectors.begin() + first * a.head_dim, vectors.begin() + last * a.head_dim);
    Queries q{};
    q.spans = spans.data() + first;
    q.count = last - first;
    q.sinks = a.rows % 2 ? sinks.data() + first : nullptr;
    q.cap = a.heads == 3 ? 5.0f : 0.0f;
    q.vectors = y.data();
    q.key_table = key_table;
    q.value_table = value_table;
    q.cells = a.cells;
    std::vector<WordCodes> codes(static_cast<size_t>(q.count * a.head_dim / kScaled));
    std::vector<float> code_scales(codes.size());
    q.codes = codes.data();
    q.code_scales = code_scales.data();
    q.keys = a.value_dim < a.head_dim ? nullptr : keys.data();
    q.values = values.data();
    q.head_dim = a.head_dim;
    q.value_dim = a.value_dim;
    q.begin = q.spans[0].first / score_step(a.cells) * score_step(a.cells);
    q.end = spans[static_cast<size_t>(last - 1)].limit;
    q.stride = score_stride(a.cells, q.end - q.begin);
    std::vector<float> scores(static_cast<size_t>(q.count * q.stride), kNothing);
    q.scores = scores.data();
    kernels.attend(q);
    return y;
  };
  if (&kernels == find_kernels("plain"))  // each query alone: the others are compared with that
    for (int64_t i = 0; i < count; i++) results.add(run(i, i + 1));
  else
    results.add(run(0, count));
}

void add_attentions(Cases& cases) {
  constexpr int64_t spans[][3] = {{0, 0, 0},    {5, 0, 0},   {37, 7, 0},  // past tokens, window, bidirectional
                                  {200, 64, 0}, {300, 0, 0}, {37, 7, 1}};
  constexpr std::pair<int64_t, int64_t> halves[] = {{16, 16},   {24, 24},   {80, 80},  {128, 128},
                                                    {256, 256}, {48, 40}, {576, 512}};
  constexpr std::pair<int64_t, int64_t> bytes[] = {{32, 32}, {128, 128}, {160, 160}};
  const auto add = [&](Cells cells, int64_t head_dim, int64_t value_dim) {
    for (const auto& [past, window, bidirectional] : spans)
      for (const int64_t heads : {1, 3, 6})
        for (const int64_t rows : {1, 2, 3, 4, 5, 8, 9}) {
          const std::string form = cells == Cells::bytes ? "attend over bytes, head" : "attend, head";
          const std::string name = text(form.c_str(), head_dim) + text(" and", value_dim) + text(", past", past) +
                                   text(", heads", heads);
          const Attended attended = {cells, head_dim, heads, rows, past, window, bidirectional != 0, value_dim};
          const auto run = [=](const Kernels& kernels, Random& random, Results& results) {
            attend(kernels, random, attended, results);
          };
          cases.push_back({name + text(", rows", rows) + (bidirectional ? ", bidirectional" : ""), run});
        }
  };
  for (const auto& [head_dim, value_dim] : halves) add(Cells::halves, head_dim, value_dim);
  for (const auto& [head_dim, value_dim] : bytes) add(Cells::bytes, head_dim, value_dim);
}

// Queries of a head whose rows all see each other.
void attend_all(const Kernels& kernels, Random& random, int64_t count, int64_t rows, int64_t groups, Results& results) {
  const int64_t tiles = (groups + 3) / 4, blocks = (rows + kTokens - 1) / kTokens, bytes = full_key_bytes(groups);
  std::vector<uint8_t> codes(static_cast<size_t>(count * groups * 4)), keys(static_cast<size_t>(blocks * 2 * bytes));
  std::vector<uint8_t> values(static_cast<size_t>(blocks * tiles * kTokens * kLanes));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(1 + random.below(127));
  for (auto* all : {&keys, &values})
    for (uint8_t& code : *all) code = static_cast<uint8_t>(random.below(255) - 127);
  for (int64_t tile = 0; tile < 2 * blocks; tile++)
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const int32_t sum = random.below(1 << 16) - (1 << 15);
      const float scale = random.real() * 0.01f;
      uint8_t* end = keys.data() + (tile + 1) * bytes - 2 * kLine + 4 * lane;
      std::memcpy(end, &sum, sizeof sum);
      std::memcpy(end + kLine, &scale, sizeof scale);
    }
  std::vector<float> scales = random.reals(count, 0.01f), sums(static_cast<size_t>(count * tiles * kLanes));
  if (count > 3) scales[3] = kNothing;
  std::vector<float> totals(scales.size());
  kernels.attend_all({codes.data(), scales.data(), count, groups, keys.data(), values.data(), rows, tiles, sums.data(),
                      totals.data()});
  for (int64_t i = 0; i < count; i++) {
    results.add(totals[static_cast<size_t>(i)]);
    for (int64_t n = 0; n < tiles * kLanes; n++)
      results.add(sums[static_cast<size_t>(i * tiles * kLanes + n)] / totals[static_cast<size_t>(i)]);
  }
}

void add_full_attentions(Cases& cases) {
  for (const int64_t count : {1, 5, 13, 48})
    for (const int64_t rows : {1, 40, 511, 1100})
      for (const int64_t groups : {1, 16, 18})
        cases.push_back({text("attend all, queries", count) + text(", rows", rows) + text(", groups", groups),
                         [=](const Kernels& kernels, Random& random, Results& results) {
                           attend_all(kernels, random, count, rows, groups, results);
                         }});
}

// ---- Delta nets ----------------------------------------------------------------------------------------

void add_convolutions(Cases& cases) {
  for (const int64_t taps : {1, 3, 4})
    cases.push_back({text("convolve", taps), [=](const Kernels& kernels, Random& random, Results& results) {
                       constexpr int64_t count = 48, stride = 64;
                       const std::vector<float> x = random.reals(taps * count), weights = random.reals(taps * stride);
                       std::vector<const float*> rows;
                       for (int64_t t = 0; t < taps; t++) rows.push_back(x.data() + t * count);
                       std::vector<float> y(count);
                       kernels.convolve(rows.data(), taps, weights.data(), stride, count, y.data());
                       results.add(y);
                     }});
}

void add_gates(Cases& cases) {
  for (const int64_t count : {1, 7, 16, 33, 1000})
    cases.push_back({text("gates", count), [=](const Kernels& kernels, Random& random, Results& results) {
                       std::vector<float> x = random.reals(count, 100.0f), y = random.reals(count);
                       const std::vector<float> bias = random.reals(count), a = random.reals(count, -8.0f);
                       x[static_cast<size_t>(random.below(static_cast<int>(count)))] = kNothing;
                       for (const Gate gate : {Gate::silu, Gate::gelu, Gate::sigmoid}) {
                         kernels.multiply(gate, x.data(), count, y.data());
                         results.add(y);
                       }
                       std::vector<float> softs(static_cast<size_t>(count));
                       kernels.decay(x.data(), bias.data(), a.data(), count, y.data(), softs.data());
                       results.add(y);
                       results.add(softs);
                       kernels.cap(x.data(), count, 30.0f, y.data());
                       results.add(y);
                     }});
}

// Rows through a state, behind some that it lacks.
void add_states(Cases& cases) {
  for (const int64_t tiles : {1, 4, 5, 8})
    for (const int64_t rows : {1, 2, 7})
      cases.push_back({text(text("recur, tiles", tiles).c_str(), rows), [=](const Kernels& kernels, Random& random,
                                                                           Results& results) {
                         constexpr int64_t keys = 48;
                         const int64_t width = tiles * kLanes;
                         std::vector<float> state = random.reals(keys * width), copy(kStateTiles * keys * kLanes);
                         const std::vector<float> queries = random.reals(rows * keys), row_keys = random.reals(rows * keys);
                         std::vector<float> deltas = random.reals(rows * width), y(static_cast<size_t>(rows * width));
                         std::vector<float> decays, strengths;
                         for (int64_t row = 0; row < rows; row++) {
                           decays.push_back(random.real() * 0.5f + 0.5f);
                           strengths.push_back(random.real() * 0.5f + 0.5f);
                         }
                         const std::vector<float> key = random.reals(keys), delta = random.reals(width);
                         const Update updates[] = {{key.data(), delta.data(), 0.9f}, {row_keys.data(), delta.data(), 0.0f}};
                         Recurrence r{};
                         r.state = state.data();
                         r.copy = rows % 2 ? copy.data() : nullptr;
                         r.key_width = keys;
                         r.tiles = tiles;
                         r.updates = updates;
                         r.update_count = tiles % 3;
                         r.rows = rows;
                         r.queries = queries.data();
                         r.keys = row_keys.data();
                         r.decays = decays.data();
                         r.strengths = strengths.data();
                         r.deltas = deltas.data();
                         r.y = y.data();
                         r.stride = width;
                         r.sums = rows == 2;
                         r.skip = 0.7f;
                         kernels.recur(r);
                         for (const std::vector<float>& values : {state, deltas, y}) results.add(values);
                       }});
}

// ---- The largest of many -------------------------------------------------------------------------------

void choose(const Kernels& kernels, const std::vector<float>& x, Results& results) {
  float value = 0.0f;
  int64_t index = 0;
  kernels.largest(x.data(), static_cast<int64_t>(x.size()), &value, &index);
  results.add(value);
  results.add(index);
  results.add(kernels.sum_exp(x.data(), static_cast<int64_t>(x.size()), value));
}

void add_choices(Cases& cases) {
  for (const int64_t count : {1, 7, 16, 33, 100, 1000})
    cases.push_back({text("largest", count), [=](const Kernels& kernels, Random& random, Results& results) {
                       std::vector<float> x = random.reals(count, 50.0f);
                       choose(kernels, x, results);
                       x[static_cast<size_t>(random.below(static_cast<int>(count)))] = kNothing;
                       choose(kernels, x, results);
                       for (float& number : x) number = static_cast<float>(random.below(4));  // many are equal
                       choose(kernels, x, results);
                       constexpr float signs[] = {-1.0f, 0.0f, -0.0f};
                       for (float& number : x) number = signs[random.below(3)];
                       choose(kernels, x, results);
                       for (const float all : {-kInfinity, kInfinity, kNothing, 3e38f, -3e38f})
                         choose(kernels, std::vector<float>(x.size(), all), results);
                     }});
}

// ---- All of them ---------------------------------------------------------------------------------------

Results run(const Case& test, const Kernels& kernels, uint64_t seed) {
  Random random(seed);
  Results results;
  test.run(kernels, random, results);
  return results;
}

// FNV-1a.
uint64_t digest(uint64_t state, const Results& results) {
  for (const uint32_t word : results.words())
    for (int shift = 0; shift < 32; shift += 8) state = (state ^ (word >> shift & 255)) * 0x100000001b3u;
  return state;
}

// ---- Threads -------------------------------------------------------------------------------------------

// Jobs in which a piece ran less or more often than once.
int lost_jobs() {
  int lost = 0;
  for (int64_t threads = 1; threads <= 4; threads++) {
    Crew crew(threads, threads % 2 == 0, threads > 2);
    const std::vector<uint8_t> bytes(256 << 10);
    const Weights* weights = crew.follow({{4, {bytes.data(), nullptr}}, {}});
    crew.follow({{4, {bytes.data(), bytes.data() + (128 << 10)}}, {}});
    for (int64_t job = 0; job < 10000; job++) {
      std::vector<int64_t> ran(static_cast<size_t>(job % 40));
      const auto run = [&](int64_t i) { ran[static_cast<size_t>(i)] += i + 1; };
      crew.spread(job % 40, run, job % 3 ? weights : nullptr);
      for (size_t i = 0; i < ran.size(); i++)
        if (ran[i] != static_cast<int64_t>(i) + 1) {
          lost++;
          break;
        }
    }
  }
  return lost;
}

// ---- Speed ---------------------------------------------------------------------------------------------

// Billions of multiplications a second of one core, its operands in the caches: the best of many runs.
double speed(const Kernels& kernels, const Matrix& matrix, int64_t inputs, int64_t rows) {
  Random random(1);
  const Rounded x(kernels, random.reals(rows * inputs), rows);
  std::vector<float> y(static_cast<size_t>(rows * matrix.part.columns));
  const Projection p = product(&matrix.part, 1, x, y);
  double least = 1e9;
  for (int i = 0; i < 200; i++) {
    const auto begun = std::chrono::steady_clock::now();
    kernels.project(p, 0, matrix.part.tile_count());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
    least = std::min(least, taken.count());
  }
  return static_cast<double>(inputs * rows * matrix.part.columns) / least / 1e9;
}

int speeds() {
  constexpr int64_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 64}, inputs = 1536, columns = 96;
  std::printf("set       format    rows:");
  for (const int64_t rows : counts) std::printf("%6d", static_cast<int>(rows));
  for (const char* name : kSets) {
    const Kernels* kernels = find_kernels(name);
    if (kernels == nullptr || kernels == find_kernels("plain")) continue;
    for (int format = 0; format < kFormatCount; format++) {
      Random random(2);
      Matrix matrix(random, format, columns, inputs);
      for (size_t i = 0; kExponents[format] && i < matrix.tiles.size(); i++)  // small factors take a processor long
        if (static_cast<int>(i) % kFormats[format].bytes >= kFactorsAt[format]) matrix.tiles[i] = 120;
      std::printf("\n%-9s %-14s", name, kFormats[format].name);
      for (const int64_t rows : counts) std::printf("%6.1f", speed(*kernels, matrix, inputs, rows));
    }
  }
  std::printf("\n");
  return 0;
}

int check() {
  Cases cases;
  add_normalizations(cases);
  add_roundings(cases);
  add_products(cases);
  add_dots(cases);
  add_extremes(cases);
  add_gathers(cases);
  add_narrowings(cases);
  add_attentions(cases);
  add_full_attentions(cases);
  add_convolutions(cases);
  add_gates(cases);
  add_states(cases);
  add_choices(cases);
  std::vector<const Kernels*> sets;
  for (const char* name : kSets)
    if (const Kernels* kernels = find_kernels(name)) sets.push_back(kernels);
  uint64_t state = 0xcbf29ce484222325u;
  int differences = lost_jobs();
  if (differences) std::printf("%d jobs of threads lost a piece or ran it twice\n", differences);
  for (size_t i = 0; i < cases.size(); i++) {
    const Results expected = run(cases[i], *sets[0], i);
    state = digest(state, expected);
    for (const Kernels* kernels : sets) {
      if (run(cases[i], *kernels, i).words() == expected.words()) continue;
      std::printf("%s: %s differs\n", kernels->name, cases[i].name.c_str());
      differences++;
    }
  }
  for (const Kernels* kernels : sets) std::printf("%s ", kernels->name);
  std::printf("digest %016llx\n", static_cast<unsigned long long>(state));
  return differences ? 1 : 0;
}

}  // namespace
}  // namespace edgespec

int main(int count, char**) { return count > 1 ? edgespec::speeds() : edgespec::check(); }
