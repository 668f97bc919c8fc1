// AVX-512 with VNNI.
#define EDGESPEC_SET avx512
#include <immintrin.h>

#include "kernels.h"

namespace edgespec::avx512 {
namespace {

constexpr int kWidth = 16, kRows = 8;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint8_t B __attribute__((vector_size(64)));

inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

inline F half(const uint8_t* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline B look_up(const uint8_t* table, B places) {
  const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (B)_mm512_shuffle_epi8(four, (__m512i)places);
}

template <int zero>
inline I begin(int32_t negated) {
  return I{} + negated * zero;
}

template <int n, int largest>
inline I dots(I sums, const B* codes, const int8_t* activations) {
#pragma GCC unroll 8
  for (int g = 0; g < n; g++) {
    int32_t four;
    __builtin_memcpy(&four, activations + 4 * g, sizeof four);
    sums = (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes[g], _mm512_set1_epi32(four));
  }
  return sums;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx512
