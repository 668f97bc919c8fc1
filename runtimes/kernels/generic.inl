// The kernels, over the primitives of an instruction set. Included once for each of them, inside a namespace
// that has vectors.inl and
//
//     kRows, kQueries          rows that share an unpacking of weights, and queries that share a widening of keys
//     kSums                    sums of attention that registers hold
//     fma(a, b, c)             a * b + c, rounded once
//     half(pointer)            16 float16 as F
//     look_up(table, places)   for each byte, which is below 16, the byte there of 16
//     pack(first, last, y)     32 numbers of 16 bits in the set's form
//     add_bytes(sums, codes, four)   for 16 lanes, plus the products of four signed bytes of each with four up to 127
//     code_products<M>(lines, queries, step, sums)   sums of 32 products of 8 bits and 16, for 16 lanes, whose bytes lie
//                              in 8 lines; the codes of a query are `step` behind those of the one before
//
// and for products with weights of a Format, whose sums are whole numbers until they are weighed:
//
//     begin<Format>(x, half)   the start of a sum of 16 products that makes it a sum of (code - zero)
//     add<Format, M>(sums, codes, a, group)   two groups' products with M rows of activations
//     settle<Format, M>(sums, a, half)   when 16 inputs are in the sums of M rows
//     weigh<Format>(sum, x, half)      scale * sum, and
//     weigh<Format>(first, last, x)    the same of both halves, added: rounded once where that is exact
//
// Every sum has one order, for any number of rows: a lane is a column, a key or a channel, and a fixed tree adds
// lanes. Only fma contracts a product and a sum.

inline F widen(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, I), F);
}

inline F widen_signed(const uint8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, I), F);
}

inline F widen_nibbles(const uint8_t* p, int shift) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector((__builtin_convertvector(v, I) >> shift) & 15, F);
}

// kLanes powers of two: 2 to the byte less 128, as ggml has it; the smallest two have no leading 1.
inline F power(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  const I e = __builtin_convertvector(v, I), bits = e > 1 ? (e - 1) << 23 : (e + 1) << 21;
  F result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

// kLanes floats of 8 bits without a sign: 4 of an exponent, whose 7 is 1, and 3 behind a leading 1, which the
// smallest do not have.
inline F small_floats(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  const I whole = __builtin_convertvector(v, I), bits = (whole << 20) + (120 << 23);
  F result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return whole > 7 ? result : __builtin_convertvector(whole, F) * (1.0f / 512.0f);
}

// e to the x, to about one unit in the last place; 0 below -87.
inline F exponential(F x) {
  const F magic = splat(12582912.0f);  // adding it rounds to a whole number
  F clamped = x < 88.0f ? x : splat(88.0f);
  clamped = clamped > -87.0f ? clamped : splat(-87.0f);
  const F n = fma(clamped, splat(1.44269504f), magic) - magic;
  F r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const I bits = (__builtin_convertvector(n, I) + 127) << 23;
  F power;
  __builtin_memcpy(&power, &bits, sizeof power);
  const F result = p * power;
  return x >= -87.0f ? result : (x < -87.0f ? F{} : x);  // not a number stays so
}

inline F activate(F x, Gate gate) {
  if (gate == Gate::sigmoid) return 1.0f / (exponential(-x) + 1.0f);
  if (gate == Gate::silu) return x / (exponential(-x) + 1.0f);
  // 0.5 x (1 + tanh(u)) with tanh(u) = 1 - 2 / (exp(2u) + 1)
  const F u = (x * x * x * 0.044715f + x) * 0.7978845608f;
  return x * (1.0f - 1.0f / (exponential(u * 2.0f) + 1.0f));
}

// max(x, 0)^2; not a number stays so.
inline F squared(F x) {
  x = x < 0.0f ? F{} : x;
  return x * x;
}

// above x^2 + slope x, and below (e^min(x, -1e-6) - 1 - x) + slope x where x is not above 0.
inline F xielu(F x, const Bend& bend) {
  const F least = splat(-1e-6f), low = x < least ? x : least;
  return (x > 0.0f ? x * x * bend.above : (exponential(low) - 1.0f - x) * bend.below) + x * bend.slope;
}

// The gate of `x`, times `other`. The clamped gate is gpt-oss's.
inline F gated(F x, F other, Gate gate) {
  if (gate != Gate::clamped) return activate(x, gate) * other;
  const F most = splat(7.0f);
  x = x > most ? most : x;
  other = other > most ? most : other;
  other = other < -most ? -most : other;
  return x / (exponential(x * -1.702f) + 1.0f) * (other + 1.0f);
}

// most * tanh(x / most); not a number where x is not finite.
inline F capped(F x, float most) {
  return (1.0f - 2.0f / (exponential(x / most * 2.0f) + 1.0f)) * most + (x - x);
}

inline float add_lanes(const float* lanes) {
  float eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// ---- Normalization and rounding of activations ---------------------------------------------------------

inline float square_root(float x) { return __builtin_sqrtf(x); }

void normalize(const float* x, const float* gain, float epsilon, int64_t width, float* y) {
  F sums = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F v = load(x + i);
    sums = fma(v, v, sums);
  }
  float lanes[kLanes];
  store(lanes, sums);
  for (int l = 0; i < width; i++, l++) lanes[l] = lanes[l] + x[i] * x[i];
  const float factor = 1.0f / square_root(add_lanes(lanes) / static_cast<float>(width) + epsilon);
  for (i = 0; i < width; i++) y[i] = x[i] * factor * gain[i];
}

inline F magnitudes(F v) { return v < 0.0f ? -v : v; }

inline float largest_lane(F v) {
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  const auto eight = larger(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  const auto four = larger(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  const auto two = larger(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return two[0] > two[1] ? two[0] : two[1];
}

// Rounds 16 activations to steps; `per_unit` steps are 1. In a row without steps all are zeros, because numbers that
// are not finite cannot be rounded.
inline int quantize_share(const float* x, float per_unit, int half, Activations* y) {
  typedef int8_t Codes __attribute__((vector_size(kLanes)));
  const F magic = splat(12582912.0f), v = per_unit > 0.0f ? load(x) : F{};
  const float most = largest_lane(magnitudes(v)) * per_unit * (1.0f / kMostCode);
  int scale = most > 0.0f ? static_cast<int>(most) : 0;
  if (static_cast<float>(scale) < most && scale < kMostScale) scale++;
  const F inverse = splat(scale > 0 ? per_unit / static_cast<float>(scale) : 0.0f);
  const Codes codes = __builtin_convertvector(__builtin_convertvector(fma(v, inverse, magic) - magic, I), Codes);
  __builtin_memcpy(y->codes + half * kShare, &codes, sizeof codes);
  int32_t lanes[kLanes];
  const I whole = __builtin_convertvector(codes, I);
  __builtin_memcpy(lanes, &whole, sizeof lanes);
  for (int i = 0; i < 8; i++) lanes[i] += lanes[i + 8];
  for (int i = 0; i < 4; i++) lanes[i] += lanes[i + 4];
  for (int i = 0; i < 2; i++)
    y->negated_pairs[half][i] = static_cast<int16_t>(-lanes[2 * i] - lanes[2 * i + 1]);
  y->negated_sums[half] = y->negated_pairs[half][0] + y->negated_pairs[half][1];
  y->scales[half] = static_cast<int16_t>(scale);
  y->twice[half] = scale << 16 | scale;
  y->floats[half] = static_cast<float>(scale);
  return scale * y->negated_sums[half];
}

float quantize(const float* x, int64_t width, Activations* y, int64_t step) {
  constexpr float kSteps = kMostScale * kMostCode;
  F most = {}, strange = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    if (i % kBlock == 0) __builtin_prefetch(y + i / kBlock * step, 1);  // other threads have read the old content
    const F v = load(x + i), size = magnitudes(v);
    strange = strange + (v - v);
    most = most < size ? size : most;
  }
  float nothing[kLanes];
  store(nothing, strange);
  const float largest = largest_lane(most) + add_lanes(nothing);
  const float per_unit = largest > 1e-30f && largest <= 3.4028235e38f ? kSteps / largest : 0.0f;  // finite
  for (int64_t i = 0; i < width; i += kBlock, y += step) {
    const int first = quantize_share(x + i, per_unit, 0, y);
    y->negated_sum = static_cast<float>(first + quantize_share(x + i + kShare, per_unit, 1, y));
  }
  return largest / kSteps;
}

#include "products.inl"

// M rows times N vectors. A lane has every sixteenth product, one after the other.
template <int M, int N>
inline void dot_block(const float* x, const float* vectors, int64_t width, float* y, int64_t stride) {
  F sums[M][N] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    F v[N];
    for (int n = 0; n < N; n++) v[n] = load(vectors + n * width + i);
    for (int m = 0; m < M; m++) {
      const F a = load(x + m * width + i);
      for (int n = 0; n < N; n++) sums[m][n] = fma(a, v[n], sums[m][n]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float lanes[kLanes];
      store(lanes, sums[m][n]);
      y[m * stride + n] = add_lanes(lanes);
    }
}

template <int M>
inline void dots_of(const float* x, const float* vectors, int64_t count, int64_t width, float* y, int64_t stride) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) dot_block<M, 4>(x, vectors + n * width, width, y + n, stride);
  for (; n < count; n++) dot_block<M, 1>(x, vectors + n * width, width, y + n, stride);
}

void dots(const float* x, int64_t rows, const float* vectors, int64_t count, int64_t width, float* y, int64_t stride) {
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) dots_of<2>(x + r * width, vectors, count, width, y + r * stride, stride);
  if (r < rows) dots_of<1>(x + r * width, vectors, count, width, y + r * stride, stride);
}

#include "attention.inl"

#include "full_attention.inl"

#include "delta.inl"

// ---- Rows of a matrix, and the largest of many ---------------------------------------------------------

template <class Format>
void gather_row(const uint8_t* tile, int64_t tile_count, int lane, float factor, float* y) {
  using T = Tile<Format>;
  for (int64_t i = 0; i < tile_count; i++, tile += T::kBytes) {
    const Factors<Format> factors(tile);
    for (int b = 0; b < Format::kSubBlocks; b++) {
      B codes[kGroups];
      for (int pair = 0; pair < kGroups / 2; pair++) unpack<Format>(tile, b, pair, codes + 2 * pair);
      for (int k = 0; k < kBlock; k++) {
        const int s = k * Format::kScales / kBlock;
        const float scale = factors.scale_of(tile, b, s)[lane];
        const int code = codes[k / 4][4 * lane + k % 4];
        float v = scale * static_cast<float>(code - Format::kZero);
        if constexpr (Format::kMinimums) v = v - factors.minimum_of(tile, b, s)[lane];
        *y++ = v * factor;
      }
    }
  }
}

typedef void (*GatherRow)(const uint8_t*, int64_t, int, float, float*);
#define EDGESPEC_GATHER(name) gather_row<name>,
constexpr GatherRow kGathers[] = {EDGESPEC_FORMATS(EDGESPEC_GATHER)};
#undef EDGESPEC_GATHER

void gather(const Part& part, int64_t inputs, int64_t row, float factor, float* y) {
  const FormatInfo& format = kFormats[part.format];
  const int64_t count = inputs / format.inputs;
  const uint8_t* tile = part.tiles + row / kLanes * count * format.bytes;
  kGathers[part.format](tile, count, static_cast<int>(row % kLanes), factor, y);
}

void largest(const float* x, int64_t count, float* value, int64_t* index) {
  F most = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F v = load(x + i);
    most = v > most ? v : most;
  }
  float best = -__builtin_inff();
  for (int l = 0; l < kLanes; l++) best = most[l] > best ? most[l] : best;
  for (; i < count; i++) best = x[i] > best ? x[i] : best;
  int64_t at = 0;
  while (at < count && x[at] != best) at++;
  *value = at < count ? x[at] : best;  // the first zero's sign, where the largest are zeros of both
  *index = at < count ? at : 0;
}

float sum_exp(const float* x, int64_t count, float most) {
  F totals = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) totals = totals + exponential(load(x + i) - most);
  float lanes[kLanes], rest[kLanes];
  for (int l = 0; l < kLanes; l++) rest[l] = i + l < count ? x[i + l] : -__builtin_inff();
  store(lanes, totals + exponential(load(rest) - most));
  return add_lanes(lanes);
}
