// ARM with the dot product of signed bytes (ARMv8.2).
#define EDGESPEC_SET neon_dot
#include "set_neon.inl"

// Codes of 8 bits are made signed by subtracting 128.
template <class Format>
inline I begin(const Activations& x, int half) {
  return kFits<Format> ? all(x.negated_sums[half] * Format::kZero) : I{};
}

template <class Format, int M>
inline void add(I* sums, const B* codes, const Activations* a, int group) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const Bytes code = __builtin_bit_cast(Bytes, kFits<Format> ? codes[i] : codes[i] ^ 128);
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const int8x16_t four = four_times(a[r], group + i);
      Ints sum = __builtin_bit_cast(Ints, sums[r]);
      for (int k = 0; k < 4; k++) sum.v[k] = vdotq_s32(sum.v[k], vreinterpretq_s8_u8(code.v[k]), four);
      sums[r] = __builtin_bit_cast(I, sum);
    }
  }
}

template <class Format, int M>
inline void settle(I*, const Activations*, int) {}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::neon_dot
