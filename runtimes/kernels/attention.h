// Attention over a KV cache that is written in place.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "sequences.h"

namespace edgespec {

// The cache is float16, or numbers of 8 bits with scales, because the speed of attention depends on the bytes that it
// reads; sums are float32. Keys lie in tiles of 16 tokens, so a lane is a token. Values of float16 lie row by row, those
// of 8 bits in tiles of 32 tokens (kernels.h). A sequence has a table of blocks of 32 tokens, and sequences may share
// blocks. Eight blocks make an extent, which lies head by head. Blocks that follow each other both in the table and in
// an extent are read together.
// A pass has rows of one or several sequences, one sequence after the other.
// The width of the input tells what it holds. With gates, a gate lies behind each query, and the result of the head is
// multiplied by its sigmoid. Without values, the keys before their normalization are the values. With queries alone,
// the layer reads the cache of another layer, and the node has no outputs of a cache. A head may have a sink: a score
// beside the scores of the tokens, with no value. With a `cap`, a score s becomes cap * tanh(s / cap).
// The keys and values of a sequence's first `injected_rows` rows are injected. These rows have no queries and no
// results. With `bidirectional`, a row also sees the later rows of its sequence.
// Keys of 8 bits are rounded after they are divided by powers of two, and queries are multiplied by the same. The gain
// of keys, and `key_sizes`, their biases or gains before attention, say which channels are large.
// With a `value_dim` below the width of a head attention is latent: values are the first channels of the keys. Only the
// keys are kept, row by row, and only those channels are normalized. The others are rotated.
template <Cells kCells>
class AttentionOver {
  static constexpr auto kCell = kCells == Cells::halves ? ort::kFloat16 : ort::kInt8;
  using Cell = std::conditional_t<kCells == Cells::halves, Half, int8_t>;

 public:
  static constexpr const char* kName = kCells == Cells::halves ? "Attention" : "Attention8";
  static constexpr ort::Inputs kInputs{{
      {"packed", ort::kFloat}, {"past_key", kCell}, {"past_value", kCell, ort::kOptional}, {"sequences", ort::kInt64},
      {"blocks", ort::kInt64}, {"cos", ort::kFloat, ort::kOptional}, {"sin", ort::kFloat, ort::kOptional},
      {"query_gain", ort::kFloat, ort::kOptional}, {"key_gain", ort::kFloat, ort::kOptional},
      {"sinks", ort::kFloat, ort::kOptional}, {"injected", ort::kFloat, ort::kOptional},
      {"injected_rows", ort::kInt64, ort::kOptional}, {"key_sizes", ort::kFloat, ort::kOptional}}};
  static constexpr std::array kOutputs = {ort::kFloat, kCell, kCell};

  AttentionOver(const Info& info, const Host& host)
      : kernels_(host.kernels),
        heads_(info.number("heads")),
        kv_heads_(info.number("kv_heads")),
        head_dim_(info.number("head_dim")),
        value_dim_(info.number("value_dim", head_dim_)),
        window_(info.number("window")),
        interleaved_(info.number("interleaved") != 0),
        bidirectional_(info.number("bidirectional", 0) != 0),
        distance_(info.number("pair_distance", 0)),
        step_(info.number("growth_step", 0)),
        growth_(info.real("growth", 0)),
        scale_(info.real("scale")),
        epsilon_(info.real("epsilon")),
        cap_(info.real("cap", 0)) {
    const bool sound = heads_ > 0 && kv_heads_ > 0 && heads_ < kMost && heads_ % kv_heads_ == 0;
    require(sound, "attention heads are no multiple of heads of keys and values");
    require(head_dim_ > 0 && head_dim_ < kMost, "a head has an impossible width");
    require(kCells == Cells::halves || head_dim_ % kScaled == 0,
            "a head's width is no multiple of the 32 channels that share a scale");
    if (info.number("normed_values", 0) != 0) units_.assign(static_cast<size_t>(head_dim_), 1.0f);
    const bool shared = kv_heads_ == 1 && head_dim_ % kLanes == 0 && units_.empty() && distance_ == 0;
    require(value_dim_ > 0 && value_dim_ <= head_dim_ && (shared || !latent()), "values have an impossible width");
    require(kCells == Cells::halves || !latent(), "latent attention keeps float16");
    require(window_ >= 0, "an attention window is negative");
    require(distance_ >= 0 && distance_ <= head_dim_ / 2, "pairs that turn lie farther apart than half a head");
    require(step_ >= 0, "queries grow after a negative number of tokens");
    require(cap_ >= 0.0f && cap_ < __builtin_inff(), "attention's scores end at an impossible number");
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kInputs["packed"]);
    const int64_t width = packed.last(), queries = heads_ * head_dim_, keys = kv_heads_ * head_dim_;
    State s{};
    s.gated = width == 2 * (queries + keys);
    s.shared = width == queries;
    s.value_step = width == queries + keys ? 0 : keys;
    const bool fits = width == queries + keys || (!latent() && (s.gated || s.shared || width == queries + 2 * keys));
    require(packed.shape.size() == 3 && fits,
            "attention's input is not float32 (1, rows, heads and twice the heads of keys)");
    s.packed = packed.floats();
    s.width = width;
    s.query_step = (s.gated ? 2 : 1) * head_dim_;
    const Tensor injected = pass.input(kInputs["injected"]);
    const int64_t injected_rows = injected ? injected.size() / (2 * keys) : 0;
    const int64_t all_rows = injected_rows + packed.size() / width;
    std::vector<Rows> sequences = sequences_of(pass.input(kInputs["sequences"]), all_rows);
    cache(pass, s);
    give_blocks(sequences, pass.input(kInputs["blocks"]), s.extents * (kExtent / kTokens), !s.shared);
    rotation(pass, s, sequences);
    s.query_gain = pass.vector(kInputs["query_gain"], value_dim_, "a gain is not as wide as a head");
    s.key_gain = pass.vector(kInputs["key_gain"], value_dim_, "a gain is not as wide as a head");
    const float* const sizes = pass.vector(kInputs["key_sizes"], kv_heads_ * head_dim_,
                                           "sizes of keys are not as many as their channels");
    const std::vector<float> factors = key_factors(s, sizes);
    s.factors = factors.data();
    s.sinks = pass.vector(kInputs["sinks"], heads_, "attention has another number of sinks than heads");
    if (injected) inject(pass, s, injected, injected_rows, sequences);
    s.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], heads_ * value_dim_});
    const auto count = static_cast<int64_t>(sequences.size());
    const auto append_one = [&](int64_t i) {
      append(s, sequences[i / kv_heads_], i % kv_heads_, s.packed + heads_ * s.query_step, width, s.value_step);
    };
    const int64_t appended = s.shared || packed.size() == 0 ? 0 : count * kv_heads_;
    if (packed.size() <= kFewRows * width)
      for (int64_t i = 0; i < appended; i++) append_one(i);
    else
      pass.spread(appended, append_one);
    const std::vector<Share> shares = shares_of(sequences, pass.threads());
    pass.spread(static_cast<int64_t>(shares.size()) * kv_heads_,
                [&](int64_t i) { attend(s, shares[static_cast<size_t>(i / kv_heads_)], i % kv_heads_); });
  }

 private:
  static constexpr int64_t kFewRows = 8, kMostQueries = 48;
  static constexpr float kUsualKey = 4.0f;          // channels of keys are mostly this large or smaller
  static constexpr float kMostFactor = 1048576.0f;

  struct State {
    const float* packed;
    int64_t width, query_step, value_step, extents, pairs;  // pairs: rotated pairs of channels in a head
    bool gated, shared;
    const float *cos, *sin, *query_gain, *key_gain, *sinks;
    const float* factors;  // (kv_heads, head_dim), of keys of 8 bits
    uint8_t *keys, *values;
    float* y;
  };

  // Writes injected keys and values to the cache, and takes their rows from `sequences`.
  void inject(const Pass& pass, const State& s, const Tensor& injected, int64_t total,
              std::vector<Rows>& sequences) const {
    const Tensor numbers = pass.input(kInputs["injected_rows"]);
    const int64_t keys = kv_heads_ * head_dim_;
    require(injected.shape.size() == 3 && injected.last() == 2 * keys && !s.shared && !latent(),
            "injected keys and values are not float32 (1, rows, twice the heads of keys)");
    require(numbers && numbers.size() == static_cast<int64_t>(sequences.size()),
            "the counts of injected rows are no int64 (sequences)");
    const auto* counts = static_cast<const int64_t*>(numbers.data);
    std::vector<Rows> kept;
    int64_t before = 0;
    for (Rows& rows : sequences) {
      const int64_t count = *counts++;
      require(count >= 0 && count <= rows.count && count <= total - before,
              "a sequence has more injected rows than there are");
      kept.push_back(rows);
      kept.back().count = count;
      kept.back().first = before;
      rows.first -= before;
      rows.past += count;
      rows.count -= count;
      before += count;
    }
    require(before == total, "there are more injected rows than the sequences have");
    pass.spread(static_cast<int64_t>(kept.size()) * kv_heads_, [&](int64_t i) {
      append(s, kept[static_cast<size_t>(i / kv_heads_)], i % kv_heads_, injected.floats(), 2 * keys, keys);
    });
  }

  // Some queries of a sequence whose heads share a head of keys: those from number `first` to `last`. Numbers go row
  // by row, so query i belongs to row i / group, and to head i % group of the heads that share the keys.
  struct Share {
    const Rows* rows;
    int64_t first, last;
  };

  // Cuts sequences into shares. Every share reads all keys of its head, so there are few of them, but enough to keep
  // all threads busy to the end.
  std::vector<Share> shares_of(const std::vector<Rows>& sequences, int64_t threads) const {
    const int64_t group = heads_ / kv_heads_;
    const auto cut = [&](int64_t most) {
      std::vector<Share> shares;
      for (const Rows& rows : sequences) {
        const int64_t queries = rows.count * group, count = (queries + most - 1) / most;
        for (int64_t i = 0; i < count; i++)
          shares.push_back({&rows, queries * i / count, queries * (i + 1) / count});
      }
      return shares;
    };
    std::vector<Share> shares = cut(kMostQueries);
    const auto pieces = static_cast<int64_t>(shares.size()) * kv_heads_;
    if (pieces == 0 || pieces >= 4 * threads || pieces % threads == 0) return shares;
    const int64_t times = threads / std::gcd(pieces, threads);
    int64_t longest = 0;
    for (const Share& share : shares) longest = std::max(longest, share.last - share.first);
    return cut((longest + times - 1) / times);
  }

  // Sets the cache of `s`, which is written in place if the pass binds the same buffer as input and output.
  void cache(const Pass& pass, State& s) const {
    uint8_t** const present[] = {&s.keys, &s.values};
    for (size_t i = 0; i < (latent() ? 1 : 2); i++) {
      const Tensor past = pass.input(kInputs["past_key"] + i);
      const bool shaped = past.shape.size() == 4 && past.shape[1] == kv_heads_ && past.shape[2] == kExtent &&
                          past.shape[3] * static_cast<int64_t>(sizeof(Cell)) == (i == 0 ? key_row() : value_row());
      require(shaped, "a KV cache is not of its type, (extents, heads, 256, a head's row)");
      require(i == 0 || past.shape[0] == s.extents, "keys and values have caches of different length");
      s.extents = past.shape[0];
      *present[i] = static_cast<uint8_t*>(s.shared ? past.data : kept<Cell>(pass, 1 + i, past));
    }
    if (latent()) s.values = s.keys;
  }

  // Bytes of a token's head.
  int64_t key_row() const { return key_bytes(kCells, head_dim_); }
  int64_t value_row() const { return value_bytes(kCells, head_dim_); }

  void rotation(const Pass& pass, State& s, const std::vector<Rows>& sequences) const {
    const Tensor cos = pass.input(kInputs["cos"]), sin = pass.input(kInputs["sin"]);
    if (!cos && !sin) return;
    const bool shaped = cos && sin && cos.shape.size() == 2 && cos.shape == sin.shape &&
                        cos.last() <= (distance_ > 0 ? distance_ : (head_dim_ - turned()) / 2);
    require(shaped, "rotary tables are not float32 (positions, half the rotated channels)");
    for (const Rows& rows : sequences)
      require(rows.past + rows.count <= cos.shape[0], "a pass goes beyond the rotary tables");
    s.cos = cos.floats();
    s.sin = sin.floats();
    s.pairs = cos.last();
  }

  // Normalizes a head's channels, rotates them for `position`, and multiplies them by `factor`.
  void prepare(const State& s, const float* x, const float* gain, int64_t position, float factor, float* y) const {
    if (gain != nullptr)
      kernels_.normalize(x, gain, epsilon_, value_dim_, y);
    const int64_t normed = gain != nullptr ? value_dim_ : 0;
    std::copy(x + normed, x + head_dim_, y + normed);
    const int64_t apart = distance_ > 0 ? distance_ : s.pairs;
    const float *cos = s.cos + position * s.pairs, *sin = s.sin + position * s.pairs;
    float* turning = y + turned();
    const auto rotate = [&](float& a, float& b, int64_t i) {
      const float first = a, second = b;
      a = first * cos[i] - second * sin[i];
      b = second * cos[i] + first * sin[i];
    };
    if (interleaved_)
      for (int64_t i = 0; i < s.pairs; i++) rotate(turning[2 * i], turning[2 * i + 1], i);
    else  // a loop of its own, which compilers turn into vectors
      for (int64_t i = 0; i < s.pairs; i++) rotate(turning[i], turning[apart + i], i);
    if (factor != 1.0f)
      for (int64_t i = 0; i < head_dim_; i++) y[i] = y[i] * factor;
  }

  // Powers of two by which keys of 8 bits are divided: (kv_heads, head_dim). A channel whose usual size is known to be
  // large, as in Qwen2.5, would drown the others that share its scale. Channels that rotate together have one factor,
  // so a query's product with a key stays what it is.
  std::vector<float> key_factors(const State& s, const float* sizes) const {
    std::vector<float> factors;
    if constexpr (kCells == Cells::halves) return factors;
    for (int64_t i = 0; i < kv_heads_ * head_dim_; i++) {
      const float size = sizes == nullptr ? 0.0f : sizes[i];
      const float gain = s.key_gain == nullptr ? 0.0f : s.key_gain[i % head_dim_];
      factors.push_back(size * size + gain * gain);
    }
    const int64_t apart = interleaved_ ? 1 : distance_ > 0 ? distance_ : s.pairs;
    for (int64_t head = 0; head < kv_heads_; head++)
      for (int64_t i = 0; i < s.pairs; i++) {
        float* first = factors.data() + head * head_dim_ + (interleaved_ ? 2 * i : i);
        first[0] = first[apart] = first[0] + first[apart];
      }
    for (float& factor : factors) {
      const float times = std::sqrt(factor) / kUsualKey;
      factor = times > 1.0f ? std::ldexp(1.0f, std::ilogb(std::min(times, kMostFactor))) : 1.0f;
    }
    return factors;
  }

  // Queries grow with the logarithm of the number of whole steps before their position.
  float scale_at(int64_t position) const {
    if (step_ == 0 || position < step_) return scale_;
    return scale_ * static_cast<float>(1.0 + growth_ * std::log1p(static_cast<double>(position / step_)));
  }

  // Appends a head's keys and values. The keys of a row begin `width` numbers behind those of the row before; the
  // values begin `value_step` numbers behind their keys.
  void append(const State& s, const Rows& rows, int64_t head, const float* from, int64_t width,
              int64_t value_step) const {
    const Buffer<float> channels(head_dim_);
    const BlockTable key_table = {rows.blocks, kv_heads_, key_row()};
    const BlockTable value_table = {rows.blocks, kv_heads_, value_row()};
    uint8_t* const keys = s.keys + head * kExtent * key_row();
    uint8_t* const values = s.values + head * kExtent * value_row();
    for (int64_t r = 0; r < rows.count; r++) {
      const float* x = from + (rows.first + r) * width + head * head_dim_;
      const int64_t token = rows.past + r;
      prepare(s, x, s.key_gain, token, 1.0f, channels.get());
      if constexpr (kCells == Cells::bytes)
        for (int64_t i = 0; i < head_dim_; i++) channels.get()[i] = channels.get()[i] / s.factors[head * head_dim_ + i];
      if (latent()) {
        write_value(channels.get(), token, keys, key_table);
        continue;
      }
      write_key(channels.get(), token, keys, key_table);
      const float* value = x + value_step;
      if (!units_.empty()) {
        kernels_.normalize(value, units_.data(), epsilon_, head_dim_, channels.get());
        value = channels.get();
      }
      write_value(value, token, values, value_table);
    }
  }

  // Writes a token's keys to a head's cache `to`.
  void write_key(const float* x, int64_t token, uint8_t* to, const BlockTable& table) const {
    const int64_t lane = token % kLanes;
    to += table.of(token - lane);
    const Buffer<Cell> numbers(head_dim_);
    if constexpr (kCells == Cells::halves) {
      std::transform(x, x + head_dim_, numbers.get(), narrow);
      for (int64_t d = 0; d < head_dim_; d++) reinterpret_cast<Half*>(to)[d * kLanes + lane] = numbers.get()[d];
    } else {
      auto* scales = reinterpret_cast<uint16_t*>(to + head_dim_ * kLanes);
      for (int64_t i = 0; i < head_dim_ / kScaled; i++)
        scales[i * kLanes + lane] = round_to_bytes(x + i * kScaled, kScaled, numbers.get() + i * kScaled);
      for (int64_t d = 0; d < head_dim_; d += 4) std::memcpy(to + d * kLanes + 4 * lane, numbers.get() + d, 4);
    }
  }

  void write_value(const float* x, int64_t token, uint8_t* to, const BlockTable& table) const {
    const int64_t place = token % kTokens;
    const Buffer<Cell> numbers(head_dim_);
    if constexpr (kCells == Cells::halves) {
      std::transform(x, x + head_dim_, reinterpret_cast<Half*>(to + table.of(token)), narrow);
    } else {
      to += table.of(token - place);
      const uint16_t scale = round_to_bytes(x, head_dim_, numbers.get());
      std::memcpy(to + head_dim_ * kTokens + 2 * place, &scale, sizeof scale);
      uint8_t* codes = to + place / 4 * kLine + place % 4;
      for (int64_t d = 0; d < head_dim_; d++)
        codes[d / kLanes * kLanes * kTokens + d % kLanes * 4] = static_cast<uint8_t>(numbers.get()[d]);
    }
  }

  void attend(const State& s, const Share& share, int64_t kv_head) const {
    const Rows& rows = *share.rows;
    const int64_t group = heads_ / kv_heads_, count = share.last - share.first;
    const auto row_of = [&](int64_t i) { return (share.first + i) / group; };
    const auto head_of = [&](int64_t i) { return kv_head * group + (share.first + i) % group; };
    const auto query = [&](int64_t i) {
      return s.packed + (rows.first + row_of(i)) * s.width + head_of(i) * s.query_step;
    };
    const Buffer<Span> spans(count);
    const Buffer<float> vectors(count * head_dim_), sinks(count);
    for (int64_t i = 0; i < count; i++) {
      const int64_t position = rows.past + row_of(i), end = position + 1;
      const int64_t limit = bidirectional_ ? rows.past + rows.count : end;
      spans.get()[i] = {window_ > 0 && end > window_ ? end - window_ : 0, limit};
      float* vector = vectors.get() + i * head_dim_;
      prepare(s, query(i), s.query_gain, position, scale_at(position), vector);
      if constexpr (kCells == Cells::bytes)
        for (int64_t d = 0; d < head_dim_; d++) vector[d] = vector[d] * s.factors[kv_head * head_dim_ + d];
      if (s.sinks != nullptr) sinks.get()[i] = s.sinks[head_of(i)];
    }
    Queries q{};
    q.spans = spans.get();
    q.count = count;
    q.sinks = s.sinks == nullptr ? nullptr : sinks.get();
    q.vectors = vectors.get();
    q.key_table = {rows.blocks, kv_heads_, key_row()};
    q.value_table = {rows.blocks, kv_heads_, value_row()};
    q.cells = kCells;
    const int64_t rounded = kCells == Cells::bytes ? count * (head_dim_ / kScaled) : 0;
    const Buffer<WordCodes> codes(rounded);
    const Buffer<float> code_scales(rounded);
    q.codes = codes.get();
    q.code_scales = code_scales.get();
    q.keys = latent() ? nullptr : s.keys + kv_head * kExtent * key_row();
    q.values = s.values + kv_head * kExtent * value_row();
    q.head_dim = head_dim_;
    q.value_dim = value_dim_;
    q.begin = spans.get()[0].first / score_step(kCells) * score_step(kCells);
    q.end = spans.get()[count - 1].limit;
    q.stride = score_stride(kCells, q.end - q.begin);
    const Buffer<float> scores(count * q.stride);
    q.scores = scores.get();
    q.cap = cap_;
    kernels_.attend(q);
    for (int64_t i = 0; i < count; i++) {
      const float* x = vectors.get() + i * head_dim_;
      float* y = s.y + ((rows.first + row_of(i)) * heads_ + head_of(i)) * value_dim_;
      std::copy(x, x + value_dim_, y);
      if (s.gated) kernels_.multiply(Gate::sigmoid, query(i) + head_dim_, head_dim_, y);
    }
  }

  bool latent() const { return value_dim_ < head_dim_; }
  int64_t turned() const { return latent() ? value_dim_ : 0; }  // the first channel of a head that is rotated

  const Kernels& kernels_;
  int64_t heads_, kv_heads_, head_dim_, value_dim_, window_;
  bool interleaved_, bidirectional_;
  int64_t distance_, step_;  // distance_: between the channels of a pair; 0 if it is the number of pairs
  float growth_, scale_, epsilon_, cap_;
  std::vector<float> units_;  // the gain of values; empty if values are not normalized
};

using Attention = AttentionOver<Cells::halves>;
using Attention8 = AttentionOver<Cells::bytes>;

}  // namespace edgespec
