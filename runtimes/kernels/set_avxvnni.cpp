// AVX-VNNI: the product of bytes of AVX-512 in 256 bits.
#define EDGESPEC_SET avxvnni
#include "set_256.inl"

template <int zero>
inline I begin(int32_t negated) {
  return I{} + negated * zero;
}

template <int n, int largest>
inline I dots(I sums, const B* codes, const int8_t* activations) {
#pragma GCC unroll 8
  for (int g = 0; g < n; g++)
    sums = (I)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes[g], four_of(activations + 4 * g));
  return sums;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avxvnni
