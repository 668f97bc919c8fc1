// ARM with the dot product of unsigned with signed bytes, which comes with i8mm.
#define EDGESPEC_SET neon_i8mm
#include "set_neon.inl"

template <int zero>
inline I begin(int32_t negated) {
  return I{} + negated * zero;
}

template <int n, int largest>
inline I dots(I sums, const B* codes, const int8_t* activations) {
  int32x4_t low = (int32x4_t)__builtin_shufflevector(sums, sums, 0, 1, 2, 3);
  int32x4_t high = (int32x4_t)__builtin_shufflevector(sums, sums, 4, 5, 6, 7);
#pragma GCC unroll 8
  for (int g = 0; g < n; g++) {
    uint8x16_t w[2];
    __builtin_memcpy(w, &codes[g], sizeof w);
    int32_t four;
    __builtin_memcpy(&four, activations + 4 * g, sizeof four);
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(four));
    low = vusdotq_s32(low, w[0], a);
    high = vusdotq_s32(high, w[1], a);
  }
  I result;
  __builtin_memcpy(&result, &low, sizeof low);
  __builtin_memcpy(reinterpret_cast<char*>(&result) + sizeof low, &high, sizeof high);
  return result;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::neon_i8mm
