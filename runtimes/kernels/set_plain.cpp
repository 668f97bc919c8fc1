// Every processor: standard C++, the reference that the others are compared with.
#define EDGESPEC_SET plain
#include "kernels.h"

namespace edgespec::plain {
namespace {

constexpr int kWidth = 16, kRows = 8;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint8_t B __attribute__((vector_size(64)));

inline F fma(F a, F b, F c) {
  for (int l = 0; l < kWidth; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
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
  for (int l = 0; l < kWidth; l++) {
    uint16_t bits;
    __builtin_memcpy(&bits, p + 2 * l, sizeof bits);
    v[l] = half_to_float(bits);
  }
  return v;
}

inline B look_up(const uint8_t* table, B places) {
  for (size_t i = 0; i < sizeof places; i++) places[i] = table[places[i]];
  return places;
}

template <int zero>
inline I begin(int32_t negated) {
  return I{} + negated * zero;
}

template <int n, int largest>
inline I dots(I sums, const B* codes, const int8_t* activations) {
  for (int g = 0; g < n; g++)
    for (int l = 0; l < kWidth; l++)
      for (int i = 0; i < 4; i++) sums[l] += codes[g][4 * l + i] * activations[4 * g + i];
  return sums;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::plain
