// AVX-512 with VNNI.
#define EDGESPEC_SET avx512
#include <immintrin.h>

#include "kernels.h"

namespace edgespec::avx512 {
namespace {

#include "vectors.inl"

constexpr int kRows = 8, kQueries = 12, kSums = 24;

inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

inline F half(const uint8_t* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline B look_up(const uint8_t* table, B places) {
  const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (B)_mm512_shuffle_epi8(four, (__m512i)places);
}

inline I dot_bytes(I sums, B codes, I fours) {
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)fours);
}
inline I dot_words(I sums, I words, I others) {
  return (I)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)words, (__m512i)others);
}
inline I both_words(I a, I b) {
  return (I)_mm512_mask_mov_epi16((__m512i)a, 0xaaaaaaaau, (__m512i)(b << 16));
}

// Codes become words: the first and third of four channels, then the second and fourth.
inline void pack_four(const int32_t* x, int32_t* four) {
  four[0] = words(x[0], x[2]);
  four[1] = words(x[1], x[3]);
}

template <int M>
inline void code_products(const uint8_t* lines, const WordCodes* queries, int64_t step, I* sums) {
  I own[M] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kGroups; i++) {
    const __m512i line = _mm512_loadu_si512(lines + i * kLine);
    const I even = (I)_mm512_srai_epi16(_mm512_slli_epi16(line, 8), 8), odd = (I)_mm512_srai_epi16(line, 8);
#pragma GCC unroll 16
    for (int q = 0; q < M; q++) {
      const int32_t* four = queries[q * step].fours[i];
      own[q] = dot_words(dot_words(own[q], even, all(four[0])), odd, all(four[1]));
    }
  }
  for (int q = 0; q < M; q++) sums[q] = own[q];
}

#include "vnni.inl"

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx512
