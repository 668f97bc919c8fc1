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

#include "vnni.inl"

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx512
