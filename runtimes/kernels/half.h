// The numbers of a KV cache: float16 (IEEE 754), or whole numbers of 8 bits with scales.
#pragma once

#include <cmath>
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

// Rounds `count` numbers to whole multiples of a scale, from -127 to 127, and returns the bits of the scale: a
// bfloat16, rounded up. It is not a number if one of the numbers is not finite, so that a failed pass does not look
// sound. Divisions round alike on every processor.
inline uint16_t round_to_bytes(const float* x, int64_t count, int8_t* codes) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; i++) {
    const float size = std::fabs(x[i]);
    finite = finite && size < __builtin_inff();
    most = size > most ? size : most;
  }
  const float exact = most / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  const auto scale = static_cast<uint16_t>((bits + 0xffff) >> 16);
  bits = static_cast<uint32_t>(scale) << 16;
  float divisor;
  std::memcpy(&divisor, &bits, sizeof divisor);
  const float magic = 12582912.0f;  // adding it rounds to a whole number
  for (int64_t i = 0; i < count; i++)
    codes[i] = finite && most > 0 ? static_cast<int8_t>(x[i] / divisor + magic - magic) : int8_t{0};
  return finite ? scale : uint16_t{0x7fc0};
}

}  // namespace edgespec
