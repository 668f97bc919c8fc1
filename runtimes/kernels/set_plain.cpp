// Every processor: standard C++, the reference that the others are compared with.
#define EDGESPEC_SET plain
#include "kernels.h"

namespace edgespec::plain {
namespace {

#include "vectors.inl"

constexpr int kRows = 8, kQueries = 8, kSums = 8;

inline F fma(F a, F b, F c) {
  for (int l = 0; l < kLanes; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
}

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-24f;
  } else {
    const uint32_t wide = (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    __builtin_memcpy(&value, &wide, sizeof value);
  }
  uint32_t result;
  __builtin_memcpy(&result, &value, sizeof result);
  result |= sign;
  __builtin_memcpy(&value, &result, sizeof value);
  return value;
}

inline F half(const uint8_t* p) {
  F v;
  for (int l = 0; l < kLanes; l++) {
    uint16_t bits;
    __builtin_memcpy(&bits, p + 2 * l, sizeof bits);
    v[l] = half_to_float(bits);
  }
  return v;
}

inline void pack(I first, I last, WordCodes* y) { pack_words(first, last, y); }

template <int M>
inline void code_products(const uint8_t* lines, const WordCodes* queries, int64_t step, I* sums) {
  for (int q = 0; q < M; q++, queries += step) {
    sums[q] = I{};
    for (int i = 0; i < kGroups; i++)
      for (int k = 0; k < 4; k++) {
        const int32_t number = static_cast<int16_t>(static_cast<uint32_t>(queries->fours[i][k % 2]) >> (k / 2 * 16));
        for (int l = 0; l < kLanes; l++)
          sums[q][l] += static_cast<int8_t>(lines[i * kLine + 4 * l + k]) * number;
      }
  }
}

inline I add_bytes(I sums, B codes, int32_t four) {
  for (int l = 0; l < kLanes; l++)
    for (int i = 0; i < 4; i++) sums[l] += static_cast<int8_t>(codes[4 * l + i]) * (four >> 8 * i & 127);
  return sums;
}

inline B look_up(const uint8_t* table, B places) {
  for (size_t i = 0; i < sizeof places; i++) places[i] = table[places[i]];
  return places;
}

template <class Format>
inline I begin(const Activations& x, int half) {
  return all(x.negated_sums[half] * Format::kZero);
}

template <class Format, int M>
inline void add(I* sums, const B* codes, const Activations* a, int group) {
  for (int r = 0; r < M; r++)
    for (int i = 0; i < 8; i++)
      for (int l = 0; l < kLanes; l++)
        sums[r][l] += codes[i / 4][4 * l + i % 4] * a[r].codes[4 * group + i];
}

template <class Format, int M>
inline void settle(I*, const Activations*, int) {}

template <class Format>
inline F weigh(I sum, const Activations& x, int half) { return weigh_in_floats(sum, x.floats[half]); }

template <class Format>
inline F weigh(I first, I last, const Activations& x) { return weigh_in_floats(first, last, x.floats); }

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::plain
