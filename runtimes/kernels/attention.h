// Attention over a KV cache that is written in place.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "context.h"

namespace edgespec {

// The cache is float16: attention is bound by the bytes it reads, and sums are float32 all the same. Keys lie
// in tiles of 16 tokens, channel by channel, so that a lane is a token; values lie row by row.
// A pass may be of several sequences, each with as many rows: their rows, lengths and caches follow each other.
class Attention {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat16, ort::kFloat16, ort::kInt64,
                                         ort::kFloat, ort::kFloat,   ort::kFloat,   ort::kFloat};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kRequired, ort::kRequired,
                                                  ort::kRequired, ort::kOptional, ort::kOptional,
                                                  ort::kOptional, ort::kOptional};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat16, ort::kFloat16};
  enum Input : size_t { kPacked, kPastKey, kPastValue, kPastLength, kCos, kSin, kQueryGain, kKeyGain };

  Attention(const Info& info, const Host& host)
      : kernels_(host.kernels),
        heads_(info.number("heads")),
        kv_heads_(info.number("kv_heads")),
        head_dim_(info.number("head_dim")),
        window_(info.number("window")),
        interleaved_(info.number("interleaved") != 0),
        scale_(info.real("scale")),
        epsilon_(info.real("epsilon")) {
    const bool sound = heads_ > 0 && kv_heads_ > 0 && heads_ < kMost && heads_ % kv_heads_ == 0;
    require(sound, "attention heads are no multiple of heads of keys and values");
    require(head_dim_ > 0 && head_dim_ < kMost, "a head has an impossible width");
    require(window_ >= 0, "an attention window is negative");
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kPacked);
    const int64_t width = (heads_ + 2 * kv_heads_) * head_dim_;
    require(packed.type == ort::kFloat && packed.shape.size() == 3 && packed.last() == width,
            "attention's input is not float32 (1, rows, heads and twice the heads of keys)");
    State s{};
    s.packed = packed.floats();
    s.width = width;
    const Tensor lengths = pass.input(kPastLength);
    const int64_t sequences = lengths.size(), rows = packed.size() / width;
    require(lengths.type == ort::kInt64 && sequences > 0, "attention's past lengths are no int64 (sequences)");
    require(rows % sequences == 0, "the sequences of a pass have different numbers of tokens");
    s.rows = rows / sequences;
    s.lengths = static_cast<const int64_t*>(lengths.data);
    cache(pass, s, sequences);
    rotation(pass, s, *std::max_element(s.lengths, s.lengths + sequences));
    s.query_gain = pass.vector(kQueryGain, head_dim_, "a gain is not as wide as a head");
    s.key_gain = pass.vector(kKeyGain, head_dim_, "a gain is not as wide as a head");
    s.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], heads_ * head_dim_});
    if (rows == 0) return;
    const auto append_one = [&](int64_t i) { append(sequence(s, i / kv_heads_), i % kv_heads_); };
    if (rows <= kFewRows)
      for (int64_t i = 0; i < sequences * kv_heads_; i++) append_one(i);
    else
      pass.spread(sequences * kv_heads_, append_one);
    const int64_t groups = (s.rows + kAttentionRows - 1) / kAttentionRows;
    pass.spread(sequences * heads_ * groups, [&](int64_t i) {
      const int64_t group = i / heads_ % groups;
      attend(sequence(s, i / (heads_ * groups)), i % heads_, s.rows * group / groups, s.rows * (group + 1) / groups);
    });
  }

 private:
  static constexpr int64_t kFewRows = 8;

  struct State {
    const float* packed;
    const int64_t* lengths;  // of the sequences
    int64_t rows, width, past, capacity, rotated;  // rows, past: of a sequence; rotated: channels of a head
    const float *cos, *sin, *query_gain, *key_gain;
    Half *keys, *values;
    float* y;
  };

  // One of the sequences of a pass.
  State sequence(State s, int64_t i) const {
    s.past = s.lengths[i];
    s.packed += i * s.rows * s.width;
    s.y += i * s.rows * heads_ * head_dim_;
    s.keys += i * kv_heads_ * s.capacity * head_dim_;
    s.values += i * kv_heads_ * s.capacity * head_dim_;
    return s;
  }

  // The cache, in place where the pass binds one buffer for what was and what is.
  void cache(const Pass& pass, State& s, int64_t sequences) const {
    Half** const present[] = {&s.keys, &s.values};
    for (size_t i = 0; i < 2; i++) {
      const Tensor past = pass.input(kPastKey + i);
      const bool shaped = past.type == ort::kFloat16 && past.shape.size() == 4 && past.shape[0] == sequences &&
                          past.shape[1] == kv_heads_ && past.shape[3] == head_dim_;
      require(shaped, "a KV cache is not float16 (sequences, heads, capacity, head width)");
      require(i == 0 || past.shape[2] == s.capacity, "keys and values have caches of different length");
      s.capacity = past.shape[2];
      require(s.capacity % kLanes == 0, "a KV cache's capacity is no multiple of 16");
      for (int64_t each = 0; each < sequences; each++)
        require(s.lengths[each] >= 0 && s.lengths[each] <= s.capacity && s.rows <= s.capacity - s.lengths[each],
                "a pass has more tokens than its KV cache has room for");
      Half* now = pass.output<Half>(1 + i, past.shape);
      if (now != past.data && past.size() > 0)
        std::memcpy(now, past.data, sizeof(Half) * static_cast<size_t>(past.size()));
      *present[i] = now;
    }
  }

  void rotation(const Pass& pass, State& s, int64_t longest) const {
    const Tensor cos = pass.input(kCos), sin = pass.input(kSin);
    if (!cos && !sin) return;
    const bool shaped = cos && sin && cos.type == ort::kFloat && sin.type == ort::kFloat &&
                        cos.shape.size() == 2 && cos.shape == sin.shape && cos.last() <= head_dim_ / 2;
    require(shaped, "rotary tables are not float32 (positions, half the rotated channels)");
    require(longest + s.rows <= cos.shape[0], "a pass goes beyond the rotary tables");
    s.cos = cos.floats();
    s.sin = sin.floats();
    s.rotated = 2 * cos.last();
  }

  // A head's channels of a row: normalized, rotated, times `factor`.
  void prepare(const State& s, const float* x, const float* gain, int64_t row, float factor, float* y) const {
    if (gain != nullptr)
      kernels_.normalize(x, gain, epsilon_, head_dim_, y);
    else
      std::copy(x, x + head_dim_, y);
    const int64_t half = s.rotated / 2;
    const float *cos = s.cos + (s.past + row) * half, *sin = s.sin + (s.past + row) * half;
    for (int64_t i = 0; i < half; i++) {
      const int64_t a = interleaved_ ? 2 * i : i, b = interleaved_ ? 2 * i + 1 : half + i;
      const float first = y[a], second = y[b];
      y[a] = first * cos[i] - second * sin[i];
      y[b] = second * cos[i] + first * sin[i];
    }
    if (factor != 1.0f)
      for (int64_t i = 0; i < head_dim_; i++) y[i] = y[i] * factor;
  }

  void append(const State& s, int64_t head) const {
    const Buffer<float> key(head_dim_);
    Half* keys = s.keys + head * s.capacity * head_dim_;
    Half* values = s.values + head * s.capacity * head_dim_;
    for (int64_t row = 0; row < s.rows; row++) {
      const float* x = s.packed + row * s.width + (heads_ + head) * head_dim_;
      prepare(s, x, s.key_gain, row, 1.0f, key.get());
      const int64_t at = s.past + row;
      Half* lane = keys + at / kLanes * kLanes * head_dim_ + at % kLanes;
      for (int64_t d = 0; d < head_dim_; d++) lane[d * kLanes] = narrow(key.get()[d]);
      const float* value = x + kv_heads_ * head_dim_;
      std::transform(value, value + head_dim_, values + at * head_dim_, narrow);
    }
  }

  void attend(const State& s, int64_t head, int64_t first, int64_t last) const {
    const int64_t rows = last - first, kv_head = head / (heads_ / kv_heads_);
    const Buffer<float> queries(rows * head_dim_);
    for (int64_t row = first; row < last; row++)
      prepare(s, s.packed + row * s.width + head * head_dim_, s.query_gain, row, scale_,
              queries.get() + (row - first) * head_dim_);
    const Buffer<float> scratch(attention_scratch(s.past + last));
    HeadAttention h{};
    h.queries = queries.get();
    h.keys = s.keys + kv_head * s.capacity * head_dim_;
    h.values = s.values + kv_head * s.capacity * head_dim_;
    h.head_dim = head_dim_;
    h.past = s.past + first;
    h.rows = rows;
    h.window = window_;
    h.scratch = scratch.get();
    h.stride = heads_ * head_dim_;
    h.y = s.y + first * h.stride + head * head_dim_;
    kernels_.attend(h);
  }

  const Kernels& kernels_;
  int64_t heads_, kv_heads_, head_dim_, window_;
  bool interleaved_;
  float scale_, epsilon_;
};

}  // namespace edgespec
