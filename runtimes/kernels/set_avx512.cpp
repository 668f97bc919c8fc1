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

inline void pack(I first, I last, WordCodes* y) { pack_words(first, last, y); }

// An instruction by name, because compilers would make a product and an addition of it: less latency, half the speed.
inline void add_words(__m512i& sum, __m512i words, const int32_t& pair) {
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(words), "m"(pair));
}

template <int M>
inline void code_products(const uint8_t* lines, const WordCodes* queries, int64_t step, I* sums) {
  __m512i own[M] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kGroups; i++) {
    const __m512i line = _mm512_loadu_si512(lines + i * kLine);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(line, 8), 8), odd = _mm512_srai_epi16(line, 8);
#pragma GCC unroll 16
    for (int q = 0; q < M; q++) {
      const int32_t* four = queries[q * step].fours[i];
      add_words(own[q], even, four[0]);
      add_words(own[q], odd, four[1]);
    }
  }
  for (int q = 0; q < M; q++) sums[q] = (I)own[q];
}

#include "vnni.inl"

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx512
