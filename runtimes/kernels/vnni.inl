// Products by vpdpbusd and vpdpwssd: over dot_bytes, dot_words, and both_words(a, b), which has the lower 16 bits
// of a and, above them, the lower 16 bits of b.

inline I add_bytes(I sums, B codes, int32_t four) {
  return dot_bytes(sums, __builtin_bit_cast(B, all(four)), __builtin_bit_cast(I, codes));
}

template <class Format>
inline I begin(const Activations& x, int half) {
  return all(x.negated_sums[half] * Format::kZero);
}

template <class Format, int M>
inline void add(I* sums, const B* codes, const Activations* a, int group) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) sums[r] = dot_bytes(sums[r], codes[i], all(four_of(a[r], group + i)));
}

template <class Format, int M>
inline void settle(I*, const Activations*, int) {}

template <class Format>
inline F weigh(I sum, const Activations& x, int half) { return weigh_in_floats(sum, x.floats[half]); }

template <class Format>
inline F weigh(I first, I last, const Activations& x) {
  if constexpr (Format::kZero != 0 || kMostDot<Format> > 32767) return weigh_in_floats(first, last, x.floats);
  int32_t scales;
  __builtin_memcpy(&scales, x.scales, sizeof scales);
  return real(dot_words(I{}, both_words(first, last), all(scales)));
}
