// Attention among the rows of a picture.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "context.h"

namespace edgespec {

// softmax(scale query key') value of each head. All rows see each other.
//
// Queries have 7 bits, keys, shares and values 8, one of which is the sign; a query and a key have a scale each, 32
// shares, and a channel of all values. Before that keys lose their mean, which adds the same to all scores of a query,
// because a channel that is large in all keys would leave few bits to others.
class FullAttention {
 public:
  static constexpr const char* kName = "FullAttention";
  static constexpr ort::Inputs kInputs{{{"query", ort::kFloat}, {"key", ort::kFloat}, {"value", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  FullAttention(const Info& info, const Host& host)
      : kernels_(host.kernels), heads_(info.number("heads")), scale_(info.real("scale")) {
    require(heads_ > 0 && heads_ < kMost, "attention has an impossible number of heads");
  }

  void run(const Pass& pass) const {
    const Tensor query = pass.input(kInputs["query"]), key = pass.input(kInputs["key"]);
    const Tensor value = pass.input(kInputs["value"]);
    const bool shaped = query.shape.size() == 3 && query.shape[0] == 1 && query.last() > 0;
    require(shaped && query.last() % heads_ == 0 && key.shape == query.shape && value.shape == query.shape,
            "queries, keys and values are not float32 (1, rows, heads) of one shape");
    State s{};
    s.query = query.floats();
    s.key = key.floats();
    s.value = value.floats();
    s.rows = query.shape[1];
    s.width = query.last();
    s.head_dim = s.width / heads_;
    s.blocks = parts(s.rows, kTokens);
    s.groups = parts(s.head_dim, 4);
    s.tiles = parts(s.head_dim, kLanes);
    s.y = pass.output<float>(0, query.shape);
    const Buffer<uint8_t> keys(heads_ * s.blocks * 2 * full_key_bytes(s.groups));
    const Buffer<uint8_t> values(heads_ * s.blocks * s.tiles * kTokens * kLanes);
    const Buffer<float> means(s.width), scales(s.width);
    s.keys = keys.get();
    s.values = values.get();
    s.means = means.get();
    s.scales = scales.get();
    pass.spread(heads_, [&](int64_t head) { measure(s, head); });
    pass.spread(heads_ * s.blocks, [&](int64_t i) { pack(s, i / s.blocks, i % s.blocks); });
    const int64_t pieces = parts(s.rows, kQueries);
    pass.spread(heads_ * pieces, [&](int64_t i) {
      attend(s, i / pieces, s.rows * (i % pieces) / pieces, s.rows * (i % pieces + 1) / pieces);
    });
  }

 private:
  static constexpr int64_t kQueries = 48;

  struct State {
    const float *query, *key, *value;  // (rows, heads, head_dim)
    int64_t rows, width, head_dim;
    int64_t blocks, groups, tiles;  // of 32 rows, and of 4 and 16 channels
    float *means, *scales;          // (heads, head_dim), of keys and of values
    uint8_t *keys, *values;         // of each head: FullQueries
    float* y;
  };

  static int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

  static float per_unit(float scale) { return scale > 1e-30f && scale < __builtin_inff() ? 1.0f / scale : 0.0f; }
  static int8_t code(float x, float per_unit) {
    const float rounded = x * per_unit + 12582912.0f;  // whose last bits are those of a whole number
    int32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return static_cast<int8_t>(bits);
  }

  // Rounds numbers to codes up to `most`, and returns their scale: not a number if one of them is none.
  static float round(const float* x, int64_t count, float most, int8_t* codes) {
    // As whole numbers magnitudes have the same order, above which those lie that are no numbers.
    int32_t size = 0;
    for (int64_t i = 0; i < count; i++) {
      int32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      size = std::max(size, bits & 0x7fffffff);
    }
    float largest;
    std::memcpy(&largest, &size, sizeof largest);
    const float scale = largest / most + (largest - largest), inverse = per_unit(scale);
    for (int64_t i = 0; i < count; i++) codes[i] = code(x[i], inverse);
    return scale;
  }

  void measure(const State& s, int64_t head) const {
    float *mean = s.means + head * s.head_dim, *scale = s.scales + head * s.head_dim;
    const Buffer<float> strange(s.head_dim);
    for (float* numbers : {mean, scale, strange.get()}) std::fill_n(numbers, s.head_dim, 0.0f);
    for (int64_t r = 0; r < s.rows; r++) {
      const float *key = s.key + r * s.width + head * s.head_dim, *value = s.value + r * s.width + head * s.head_dim;
      for (int64_t d = 0; d < s.head_dim; d++) {
        mean[d] = mean[d] + key[d];
        scale[d] = std::max(scale[d], std::fabs(value[d]));
        strange.get()[d] = strange.get()[d] + (value[d] - value[d]);
      }
    }
    for (int64_t d = 0; d < s.head_dim; d++) {
      mean[d] = mean[d] / static_cast<float>(s.rows);
      scale[d] = scale[d] / 127.0f + strange.get()[d];
    }
  }

  // Writes a block of keys and values, with zeros behind the last row and channel.
  void pack(const State& s, int64_t head, int64_t block) const {
    const int64_t first = block * kTokens, count = std::min<int64_t>(kTokens, s.rows - first), from = head * s.head_dim;
    const int64_t bytes = full_key_bytes(s.groups), size = s.tiles * kTokens * kLanes;
    uint8_t* keys = s.keys + (head * s.blocks + block) * 2 * bytes;
    uint8_t* values = s.values + (head * s.blocks + block) * size;
    std::fill_n(keys, 2 * bytes, uint8_t{0});
    std::fill_n(values, size, uint8_t{0});
    const Buffer<float> numbers(s.head_dim);
    const Buffer<int8_t> codes(s.head_dim);
    for (int64_t k = 0; k < count; k++) {
      const float* key = s.key + (first + k) * s.width + from;
      for (int64_t d = 0; d < s.head_dim; d++) numbers.get()[d] = key[d] - s.means[from + d];
      const float scale = round(numbers.get(), s.head_dim, 127.0f, codes.get());
      uint8_t *tile = keys + k / kLanes * bytes, *end = tile + s.groups * kLine;
      const int64_t lane = k % kLanes;
      int32_t sum = 0;
      for (int64_t d = 0; d < s.head_dim; d++) {
        tile[d / 4 * kLine + 4 * lane + d % 4] = static_cast<uint8_t>(codes.get()[d]);
        sum -= FullQueries::kZero * codes.get()[d];
      }
      std::memcpy(end + 4 * lane, &sum, sizeof sum);
      std::memcpy(end + kLine + 4 * lane, &scale, sizeof scale);
    }
    for (int64_t d = 0; d < s.head_dim; d++) {
      const float inverse = per_unit(s.scales[from + d]);
      uint8_t* lane = values + d / kLanes * kTokens * kLanes + d % kLanes * 4;
      for (int64_t k = 0; k < count; k++)
        lane[k / 4 * kLine + k % 4] = static_cast<uint8_t>(code(s.value[(first + k) * s.width + from + d], inverse));
    }
  }

  void attend(const State& s, int64_t head, int64_t first, int64_t last) const {
    const int64_t count = last - first, from = head * s.head_dim, width = s.tiles * kLanes;
    const Buffer<int8_t> codes(count * s.groups * 4);
    const Buffer<float> sums(count * width);
    float scales[kQueries], totals[kQueries];
    std::fill_n(codes.get(), count * s.groups * 4, int8_t{0});
    for (int64_t q = 0; q < count; q++) {
      int8_t* own = codes.get() + q * s.groups * 4;
      scales[q] = scale_ * round(s.query + (first + q) * s.width + from, s.head_dim, FullQueries::kZero - 1, own);
      for (int64_t d = 0; d < s.head_dim; d++) own[d] = static_cast<int8_t>(own[d] + FullQueries::kZero);
    }
    FullQueries q{};
    q.codes = reinterpret_cast<const uint8_t*>(codes.get());
    q.scales = scales;
    q.count = count;
    q.groups = s.groups;
    q.keys = s.keys + head * s.blocks * 2 * full_key_bytes(s.groups);
    q.values = s.values + head * s.blocks * s.tiles * kTokens * kLanes;
    q.rows = s.rows;
    q.tiles = s.tiles;
    q.sums = sums.get();
    q.totals = totals;
    kernels_.attend_all(q);
    for (int64_t r = 0; r < count; r++) {
      float* y = s.y + (first + r) * s.width + from;
      for (int64_t d = 0; d < s.head_dim; d++) y[d] = sums.get()[r * width + d] * s.scales[from + d] / totals[r];
    }
  }

  const Kernels& kernels_;
  int64_t heads_;
  float scale_;
};

}  // namespace edgespec
