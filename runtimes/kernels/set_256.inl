// What AVX-VNNI and AVX2 share: 16 lanes in two registers of 256 bits.
#include <immintrin.h>

#include "kernels.h"

namespace edgespec::EDGESPEC_SET {
namespace {

#include "vectors.inl"

constexpr int kQueries = 6, kSums = 6;
struct Ints { __m256i v[2]; };
struct Floats { __m256 v[2]; };

// Computes both halves before either goes on; else the compiler keeps shared values in memory.
inline void together(Ints& x) { __asm__("" : "+x"(x.v[0]), "+x"(x.v[1])); }

inline F fma(F a, F b, F c) {
  const Floats x = __builtin_bit_cast(Floats, a), y = __builtin_bit_cast(Floats, b);
  Floats sums = __builtin_bit_cast(Floats, c);
  for (int i = 0; i < 2; i++) sums.v[i] = _mm256_fmadd_ps(x.v[i], y.v[i], sums.v[i]);
  return __builtin_bit_cast(F, sums);
}

inline F half(const uint8_t* p) {
  Floats wide;
  for (int i = 0; i < 2; i++) wide.v[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i));
  return __builtin_bit_cast(F, wide);
}

inline void pack(I first, I last, WordCodes* y) { pack_words(first, last, y); }

inline __m256i added_words(__m256i sum, __m256i words, __m256i others);

// Eight lanes at a time, so that the sums of all queries stay in registers.
template <int M>
inline void code_products(const uint8_t* lines, const WordCodes* queries, int64_t step, I* sums) {
  for (int half = 0; half < 2; half++) {
    __m256i own[M] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kGroups; i++) {
      const __m256i line = _mm256_loadu_si256((const __m256i*)(lines + i * kLine) + half);
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(line, 8), 8), odd = _mm256_srai_epi16(line, 8);
#pragma GCC unroll 8
      for (int q = 0; q < M; q++) {
        const int32_t* four = queries[q * step].fours[i];
        own[q] = added_words(own[q], even, _mm256_set1_epi32(four[0]));
        own[q] = added_words(own[q], odd, _mm256_set1_epi32(four[1]));
      }
    }
    for (int q = 0; q < M; q++) _mm256_storeu_si256((__m256i*)(sums + q) + half, own[q]);
  }
}

inline B look_up(const uint8_t* table, B places) {
  const __m256i two = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  Ints result = __builtin_bit_cast(Ints, places);
  for (__m256i& part : result.v) part = _mm256_shuffle_epi8(two, part);
  return __builtin_bit_cast(B, result);
}
