// ARM with i8mm: usmmla multiplies eight inputs of two columns with eight inputs of two rows. A single row takes the
// dot product of unsigned with signed bytes.
#define EDGESPEC_SET neon_i8mm
#include "set_neon.inl"

template <class Format>
inline I begin(const Activations&, int) { return I{}; }

// Two rows and eight inputs: while they are added, sums of both rows lie side by side, column by column.
inline void add_two(Ints* sums, const Bytes* codes, const Activations& x, const Activations& y, int group) {
  const int8x16_t rows = vcombine_s8(vld1_s8(x.codes + 4 * group), vld1_s8(y.codes + 4 * group));
  for (int k = 0; k < 4; k++) {
    const uint32x4_t first = vreinterpretq_u32_u8(codes[0].v[k]), last = vreinterpretq_u32_u8(codes[1].v[k]);
    int32x4_t* to = sums[k / 2].v + k % 2 * 2;
    to[0] = vusmmlaq_s32(to[0], vreinterpretq_u8_u32(vzip1q_u32(first, last)), rows);
    to[1] = vusmmlaq_s32(to[1], vreinterpretq_u8_u32(vzip2q_u32(first, last)), rows);
  }
}

template <class Format, int M>
inline void add(I* sums, const B* codes, const Activations* a, int group) {
  const Bytes both[2] = {__builtin_bit_cast(Bytes, codes[0]), __builtin_bit_cast(Bytes, codes[1])};
#pragma GCC unroll 4
  for (int r = 0; r + 1 < M; r += 2) {
    Ints two[2] = {__builtin_bit_cast(Ints, sums[r]), __builtin_bit_cast(Ints, sums[r + 1])};
    add_two(two, both, a[r], a[r + 1], group);
    for (int i = 0; i < 2; i++) sums[r + i] = __builtin_bit_cast(I, two[i]);
  }
  if constexpr (M % 2 == 1)
    for (int i = 0; i < 2; i++) {
      Ints sum = __builtin_bit_cast(Ints, sums[M - 1]);
      const int8x16_t four = four_times(a[M - 1], group + i);
      for (int k = 0; k < 4; k++) sum.v[k] = vusdotq_s32(sum.v[k], both[i].v[k], four);
      sums[M - 1] = __builtin_bit_cast(I, sum);
    }
}

template <class Format, int M>
inline void settle(I* sums, const Activations* a, int half) {
#pragma GCC unroll 4
  for (int r = 0; r + 1 < M; r += 2) {
    const Ints two[2] = {__builtin_bit_cast(Ints, sums[r]), __builtin_bit_cast(Ints, sums[r + 1])};
    Ints apart[2];
    for (int k = 0; k < 4; k++) {
      const int32x4_t* from = two[k / 2].v + k % 2 * 2;
      apart[0].v[k] = vuzp1q_s32(from[0], from[1]);
      apart[1].v[k] = vuzp2q_s32(from[0], from[1]);
    }
    for (int i = 0; i < 2; i++) sums[r + i] = __builtin_bit_cast(I, apart[i]);
  }
  if constexpr (Format::kZero != 0)
    for (int r = 0; r < M; r++) sums[r] += a[r].negated_sums[half] * Format::kZero;
}

#include "generic.inl"

}  // namespace
#include "table.inl"
}  // namespace edgespec::neon_i8mm
