// AVX2 has no product of bytes that adds up in 32 bits, so the products of 16 inputs are added in pairs, in 16 bits.
// They may wrap around on the way, but the sum of (code - zero) does not: it has half of the range.
#define EDGESPEC_SET avx2
#include "set_256.inl"

constexpr int kRows = 6;

inline __m256i added_words(__m256i sum, __m256i words, __m256i others) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(words, others));
}

inline I add_bytes(I sums, B codes, int32_t four) {
  Ints sum = __builtin_bit_cast(Ints, sums);
  const Ints code = __builtin_bit_cast(Ints, codes);
  for (int k = 0; k < 2; k++) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(four), code.v[k]);  // below 15 bits and a sign
    sum.v[k] = _mm256_add_epi32(sum.v[k], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  together(sum);
  return __builtin_bit_cast(I, sum);
}

template <class Format>
inline I begin(const Activations& x, int half) {
  if constexpr (!kFits<Format> || Format::kZero == 0) return I{};
  int32_t pairs;
  __builtin_memcpy(&pairs, x.negated_pairs[half], sizeof pairs);
  const __m256i sums = _mm256_mullo_epi16(_mm256_set1_epi32(pairs), _mm256_set1_epi16(Format::kZero));
  return __builtin_bit_cast(I, Ints{{sums, sums}});
}

// Wider codes are made signed by subtracting 128. Then magnitudes are multiplied, the signs go to the activations,
// and pairs are added in 32 bits.
template <class Format>
inline __m256i added(__m256i sum, __m256i code, __m256i four) {
  if constexpr (kFits<Format>) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(code, four));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(four, code));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <class Format, int M>
inline void add(I* sums, const B* codes, const Activations* a, int group) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const Ints code = __builtin_bit_cast(Ints, kFits<Format> ? codes[i] : codes[i] ^ 128);
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const __m256i four = _mm256_set1_epi32(four_of(a[r], group + i));
      Ints sum = __builtin_bit_cast(Ints, sums[r]);
      for (int k = 0; k < 2; k++) sum.v[k] = added<Format>(sum.v[k], code.v[k], four);
      together(sum);
      sums[r] = __builtin_bit_cast(I, sum);
    }
  }
}

template <class Format, int M>
inline void settle(I*, const Activations*, int) {}

inline I scaled(I sum, const Activations& x, int half) {
  Ints pairs = __builtin_bit_cast(Ints, sum);
  for (__m256i& part : pairs.v) part = _mm256_madd_epi16(part, _mm256_set1_epi32(x.twice[half]));
  return __builtin_bit_cast(I, pairs);
}

template <class Format>
inline F weigh(I sum, const Activations& x, int half) {
  if constexpr (!kFits<Format>) return weigh_in_floats(sum, x.floats[half]);
  return real(scaled(sum, x, half));
}

template <class Format>
inline F weigh(I first, I last, const Activations& x) {
  if constexpr (!kFits<Format>) return weigh_in_floats(first, last, x.floats);
  return real(scaled(first, x, 0) + scaled(last, x, 1));
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::avx2
