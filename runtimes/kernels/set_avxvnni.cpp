// AVX-VNNI: the products of AVX-512 in 256 bits.
#define EDGESPEC_SET avxvnni
#include "set_256.inl"

constexpr int kRows = 5;

inline __m256i added_words(__m256i sum, __m256i words, __m256i others) {
  return _mm256_dpwssd_avx_epi32(sum, words, others);
}

inline I dot_bytes(I sums, B codes, I fours) {
  Ints z = __builtin_bit_cast(Ints, sums);
  const Ints x = __builtin_bit_cast(Ints, codes), y = __builtin_bit_cast(Ints, fours);
  for (int i = 0; i < 2; i++) z.v[i] = _mm256_dpbusd_avx_epi32(z.v[i], x.v[i], y.v[i]);
  together(z);
  return __builtin_bit_cast(I, z);
}
inline I dot_words(I sums, I words, I others) {
  Ints z = __builtin_bit_cast(Ints, sums);
  const Ints x = __builtin_bit_cast(Ints, words), y = __builtin_bit_cast(Ints, others);
  for (int i = 0; i < 2; i++) z.v[i] = _mm256_dpwssd_avx_epi32(z.v[i], x.v[i], y.v[i]);
  return __builtin_bit_cast(I, z);
}
inline I both_words(I a, I b) {
  const Ints low = __builtin_bit_cast(Ints, a), high = __builtin_bit_cast(Ints, b << 16);
  Ints both;
  for (int i = 0; i < 2; i++) both.v[i] = _mm256_blend_epi16(low.v[i], high.v[i], 0xaa);
  return __builtin_bit_cast(I, both);
}

#include "vnni.inl"

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avxvnni
