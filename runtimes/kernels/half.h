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
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<Half>(sign | 0x7e00);   // not a number
  if (size == 0x7f800000) return static_cast<Half>(sign | 0x7c00);  // infinite
  if (size >= 0x477fe000) return static_cast<Half>(sign | 0x7bff);  // 65504 and more
  if (size >= 0x38800000)                                           // 2^-14, the smallest with a leading 1
    return static_cast<Half>(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
  float steps;  // of 2^-24, the distance of floats between 0.5 and 1
  std::memcpy(&steps, &size, sizeof steps);
  steps = steps + 0.5f;
  std::memcpy(&bits, &steps, sizeof bits);
  return static_cast<Half>(sign | (bits - 0x3f000000));
}

}  // namespace edgespec
