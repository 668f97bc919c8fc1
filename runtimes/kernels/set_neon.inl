// What both sets of ARM instructions share: 16 lanes in four registers.
#include <arm_neon.h>

#include "kernels.h"

namespace edgespec::EDGESPEC_SET {
namespace {

#include "vectors.inl"

constexpr int kRows = 4, kQueries = 6, kSums = 6;
struct Floats { float32x4_t v[4]; };
struct Ints { int32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };

inline F fma(F a, F b, F c) {
  const Floats x = __builtin_bit_cast(Floats, a), y = __builtin_bit_cast(Floats, b);
  Floats sums = __builtin_bit_cast(Floats, c);
  for (int i = 0; i < 4; i++) sums.v[i] = vfmaq_f32(sums.v[i], x.v[i], y.v[i]);
  return __builtin_bit_cast(F, sums);
}

inline B look_up(const uint8_t* table, B places) {
  Bytes result = __builtin_bit_cast(Bytes, places);
  for (uint8x16_t& part : result.v) part = vqtbl1q_u8(vld1q_u8(table), part);
  return __builtin_bit_cast(B, result);
}

inline F half(const uint8_t* p) {
  Floats wide;
  for (int i = 0; i < 4; i++) {
    float16x4_t v;
    __builtin_memcpy(&v, p + 8 * i, sizeof v);
    wide.v[i] = vcvt_f32_f16(v);
  }
  return __builtin_bit_cast(F, wide);
}

// The high bytes of each four numbers, then the low bytes: both are products of signed bytes.
inline void pack(I first, I last, WordCodes* y) {
  typedef int8_t Codes __attribute__((vector_size(kLanes)));
  typedef int32_t Fours __attribute__((vector_size(kLanes)));
  for (int half = 0; half < 2; half++) {
    const I x = half == 0 ? first : last, above = (x + 128) >> 8;
    const Fours high = __builtin_bit_cast(Fours, __builtin_convertvector(above, Codes));
    const Fours low = __builtin_bit_cast(Fours, __builtin_convertvector(x - above * 256, Codes));
    for (int i = 0; i < 4; i++) {
      y->fours[4 * half + i][0] = high[i];
      y->fours[4 * half + i][1] = low[i];
    }
  }
}

template <int M>
inline void code_products(const uint8_t* lines, const WordCodes* queries, int64_t step, I* sums) {
  for (int q = 0; q < M; q++, queries += step) {
    Ints high = {}, low = {};
#pragma GCC unroll 8
    for (int i = 0; i < kGroups; i++) {
      const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(queries->fours[i][0]));
      const int8x16_t y = vreinterpretq_s8_s32(vdupq_n_s32(queries->fours[i][1]));
      for (int k = 0; k < 4; k++) {
        const int8x16_t code = vreinterpretq_s8_u8(vld1q_u8(lines + i * kLine + 16 * k));
        high.v[k] = vdotq_s32(high.v[k], code, x);
        low.v[k] = vdotq_s32(low.v[k], code, y);
      }
    }
    sums[q] = __builtin_bit_cast(I, high) * 256 + __builtin_bit_cast(I, low);
  }
}

inline I add_bytes(I sums, B codes, int32_t four) {
  Ints sum = __builtin_bit_cast(Ints, sums);
  const Bytes code = __builtin_bit_cast(Bytes, codes);
  for (int k = 0; k < 4; k++)
    sum.v[k] = vdotq_s32(sum.v[k], vreinterpretq_s8_u8(code.v[k]), vreinterpretq_s8_s32(vdupq_n_s32(four)));
  return __builtin_bit_cast(I, sum);
}

inline int8x16_t four_times(const Activations& x, int group) {
  return vreinterpretq_s8_s32(vdupq_n_s32(four_of(x, group)));
}

template <class Format>
inline F weigh(I sum, const Activations& x, int half) { return weigh_in_floats(sum, x.floats[half]); }

template <class Format>
inline F weigh(I first, I last, const Activations& x) {
  if constexpr (!kFits<Format>) return weigh_in_floats(first, last, x.floats);
  return real(first * x.scales[0] + last * x.scales[1]);
}
