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

inline B look_up(const uint8_t* table, B places) {
  const __m256i two = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  Ints result = __builtin_bit_cast(Ints, places);
  for (__m256i& part : result.v) part = _mm256_shuffle_epi8(two, part);
  return __builtin_bit_cast(B, result);
}
