// Float16 (IEEE 754), which the KV cache holds.
#pragma once

#include <cstdint>
#include <cstring>

namespace edgespec {

using Half = uint16_t;  // its bits

// The nearest float16; of two nearest the even one. Finite numbers stay finite: a channel beyond 65504 becomes too
// small, not infinite, because an infinite value times a share of 0 is NaN. Other numbers stay not finite, so that a
// failed pass does not look sound. The conversion uses integers instead of F16C or NEON, so every processor writes
// the same cache; attention reads it far more often than it is written.
inline Half narrow(float x) {
  int32_t bits, small;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t size = bits & 0x7fffffff;
  float steps;  // of 2^-24, the distance of floats between 0.5 and 1
  std::memcpy(&steps, &size, sizeof steps);
  steps = steps + 0.5f;
  std::memcpy(&small, &steps, sizeof small);
  // 2^-14 is the smallest with a leading 1. There are no branches, so that a row is narrowed in vectors.
  int32_t half = size >= 0x38800000 ? (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13 : small - 0x3f000000;
  half = size >= 0x477fe000 ? 0x7bff : half;  // 65504 and more
  half = size >= 0x7f800000 ? 0x7c00 : half;  // infinite
  half = size > 0x7f800000 ? 0x7e00 : half;   // not a number
  return static_cast<Half>((bits >> 16 & 0x8000) | half);
}

}  // namespace edgespec
