// What every set of instructions starts from: vectors of 16 lanes, in as many registers as they take, and sums of
// 16 products that are weighed in floats. That is exact where a sum times its scale fits 24 bits; codes of 8 bits are
// weighed so in every set, in this order.

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint8_t B __attribute__((vector_size(4 * kLanes)));

inline F load(const float* p) { F v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
inline B load_line(const uint8_t* p) { B v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline F splat(float x) {
  F v;
  for (int l = 0; l < kLanes; l++) v[l] = x;
  return v;
}
inline I all(int32_t value) { return I{} + value; }
inline F real(I value) { return __builtin_convertvector(value, F); }

inline int32_t four_of(const Activations& x, int group) {
  int32_t four;
  __builtin_memcpy(&four, x.codes + 4 * group, sizeof four);
  return four;
}

inline F fma(F a, F b, F c);

// Of each four of 32 numbers the first and third as words, then the second and fourth.
inline void pack_words(I first, I last, WordCodes* y) {
  const auto pairs = [](I x) {
    return (x & 0xffff) | __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) << 16;
  };
  const I both = __builtin_shufflevector(pairs(first), pairs(last), 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
  __builtin_memcpy(y, &both, sizeof both);
}

inline F weigh_in_floats(I sum, float scale) { return real(sum) * splat(scale); }
inline F weigh_in_floats(I first, I last, const float* scales) {
  return fma(real(last), splat(scales[1]), weigh_in_floats(first, scales[0]));
}
