// What AVX-VNNI and AVX2 share: vectors of 256 bits.
#include <immintrin.h>

#include "kernels.h"

namespace edgespec::EDGESPEC_SET {
namespace {

constexpr int kWidth = 8, kRows = 4;
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));

inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

inline F half(const uint8_t* p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

inline B look_up(const uint8_t* table, B places) {
  const __m256i two = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (B)_mm256_shuffle_epi8(two, (__m256i)places);
}

inline __m256i four_of(const int8_t* activations) {
  int32_t four;
  __builtin_memcpy(&four, activations, sizeof four);
  return _mm256_set1_epi32(four);
}
