// AVX2 has no product of bytes that adds up in 32 bits; pairs are added in 16, as many as fit.
#define EDGESPEC_SET avx2
#include "set_256.inl"

// Codes of 8 bits are made signed, which takes 128 off them.
template <int zero>
inline I begin(int32_t negated) {
  return zero == 128 ? I{} : I{} + negated * zero;
}

template <int n, int largest>
inline I dots(I sums, const B* codes, const int8_t* activations) {
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int fits = 32767 / (2 * 127 * largest);  // groups
  if constexpr (fits == 0) {                         // magnitudes, their signs on the activations
#pragma GCC unroll 8
    for (int g = 0; g < n; g++) {
      const __m256i code = (__m256i)(codes[g] ^ 128);
      const __m256i a = _mm256_sign_epi8(four_of(activations + 4 * g), code);
      sums += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(code), a), ones);
    }
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < n; g += fits) {
      __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int i = g; i < g + fits && i < n; i++)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[i], four_of(activations + 4 * i)));
      sums += (I)_mm256_madd_epi16(pairs, ones);
    }
  }
  return sums;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx2
