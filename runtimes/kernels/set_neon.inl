// What both sets of ARM instructions share: eight lanes in two registers.
#include <arm_neon.h>

#include "kernels.h"

namespace edgespec::EDGESPEC_SET {
namespace {

constexpr int kWidth = 8, kRows = 4;
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

inline F join(float32x4_t low, float32x4_t high) {
  return __builtin_shufflevector((Quarter)low, (Quarter)high, 0, 1, 2, 3, 4, 5, 6, 7);
}
inline float32x4_t low_of(F v) { return (float32x4_t)__builtin_shufflevector(v, v, 0, 1, 2, 3); }
inline float32x4_t high_of(F v) { return (float32x4_t)__builtin_shufflevector(v, v, 4, 5, 6, 7); }

inline F fma(F a, F b, F c) {
  return join(vfmaq_f32(low_of(c), low_of(a), low_of(b)), vfmaq_f32(high_of(c), high_of(a), high_of(b)));
}

inline B look_up(const uint8_t* table, B places) {
  uint8x16_t v[2];
  __builtin_memcpy(v, &places, sizeof v);
  for (uint8x16_t& each : v) each = vqtbl1q_u8(vld1q_u8(table), each);
  __builtin_memcpy(&places, v, sizeof v);
  return places;
}

inline F half(const uint8_t* p) {
  float16x8_t v;
  __builtin_memcpy(&v, p, sizeof v);
  return join(vcvt_f32_f16(vget_low_f16(v)), vcvt_f32_f16(vget_high_f16(v)));
}
