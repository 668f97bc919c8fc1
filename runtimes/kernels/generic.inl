// The kernels, over the primitives of an instruction set. Included once for each of them, inside a namespace
// that has
//
//     kWidth, kRows            lanes computed at once; rows that one unpacking of weights serves
//     F, I, B                  vectors of kWidth float32, of kWidth int32, of 4 * kWidth bytes
//     fma(a, b, c)             a * b + c, rounded once
//     half(pointer)            kWidth float16 as F
//     begin<zero>(negated)     what dots starts from so that its sums are those of (code - zero)
//     dots<n, largest>(start, codes, activations)   adds n groups; no code is above `largest`
//
// Every sum has one order, whatever the vectors' width and the number of rows: a lane is a column, a key or
// a channel, and lanes are added by one tree. Nothing is contracted but where fma says so.

constexpr int kHalves = kLanes / kWidth;

inline F load(const float* p) { F v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
inline B load_line(const uint8_t* p) { B v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline F splat(float x) {
  F v;
  for (int l = 0; l < kWidth; l++) v[l] = x;
  return v;
}

inline F widen(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, I), F);
}

inline F widen_signed(const uint8_t* p) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, I), F);
}

inline F widen_nibbles(const uint8_t* p, int shift) {
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector((__builtin_convertvector(v, I) >> shift) & 15, F);
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
  if (gate == Gate::silu) return x / (exponential(-x) + 1.0f);
  // 0.5 x (1 + tanh(u)) with tanh(u) = 1 - 2 / (exp(2u) + 1)
  const F u = (x * x * x * 0.044715f + x) * 0.7978845608f;
  return x * (1.0f - 1.0f / (exponential(u * 2.0f) + 1.0f));
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
  F sums[kHalves] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int h = 0; h < kHalves; h++) {
      const F v = load(x + i + h * kWidth);
      sums[h] = fma(v, v, sums[h]);
    }
  float lanes[kLanes];
  for (int h = 0; h < kHalves; h++) store(lanes + h * kWidth, sums[h]);
  for (int l = 0; i < width; i++, l++) lanes[l] = lanes[l] + x[i] * x[i];
  const float factor = 1.0f / square_root(add_lanes(lanes) / static_cast<float>(width) + epsilon);
  for (i = 0; i < width; i++) y[i] = x[i] * factor * gain[i];
}

void quantize(const float* x, int64_t width, Activations* y) {
  typedef int8_t Codes __attribute__((vector_size(kWidth)));
  const F magic = splat(12582912.0f);
  for (int64_t i = 0; i < width; i += kShare) {
    const int half = static_cast<int>(i % kBlock / kShare);
    F most = {}, strange = {};
    for (int j = 0; j < kShare; j += kWidth) {
      F v = load(x + i + j);
      strange = strange + (v - v);
      v = v < 0.0f ? -v : v;
      most = most < v ? v : most;
    }
    float largest = 0.0f, nothing = 0.0f;
    for (int l = 0; l < kWidth; l++) {
      largest = most[l] > largest ? most[l] : largest;
      nothing = nothing + strange[l];
    }
    y->scales[half] = largest / 127.0f + nothing;  // not a number where an activation is not finite
    const F inverse = splat(largest > 1e-30f ? 127.0f / largest : 0.0f);  // finite
    int8_t* codes = y->codes + half * kShare;
    for (int j = 0; j < kShare; j += kWidth) {
      const F rounded = fma(load(x + i + j), inverse, magic) - magic;
      const Codes vector = __builtin_convertvector(__builtin_convertvector(rounded, I), Codes);
      __builtin_memcpy(codes + j, &vector, sizeof vector);
    }
    int32_t sum = 0;
    for (int j = 0; j < kShare; j++) sum += codes[j];
    y->negated_sums[half] = -sum;
    if (half == 1) {
      y->negated_sum = y->scales[0] * static_cast<float>(y->negated_sums[0]) +
                       y->scales[1] * static_cast<float>(y->negated_sums[1]);
      y++;
    }
  }
}

// ---- Products ------------------------------------------------------------------------------------------

// The codes of the eight groups of block `b`, lanes from `lane` on.
template <class Format>
inline void unpack(const uint8_t* tile, int b, int lane, B* codes) {
  using T = Tile<Format>;
  const uint8_t* low = tile + b * T::kLowLines * kLine + 4 * lane;
  if constexpr (Format::kBits == 8) {
    for (int g = 0; g < kGroups; g++) codes[g] = load_line(low + g * kLine);
  } else if constexpr (Format::kBits == 4) {
    for (int j = 0; j < 4; j++) {
      const B v = load_line(low + j * kLine);
      codes[2 * j] = v & 15;
      codes[2 * j + 1] = v >> 4;
    }
  } else {
    for (int j = 0; j < 2; j++) {
      const B v = load_line(low + j * kLine);
      for (int g = 0; g < 4; g++) codes[4 * j + g] = (v >> (2 * g)) & 3;
    }
  }
  const uint8_t* high = tile + T::kHigh + b * T::kHighLines * kLine + 4 * lane;
  if constexpr (Format::kHighBits == 1) {
    const B v = load_line(high);
    for (int g = 0; g < kGroups; g++) codes[g] |= ((v >> g) & 1) << Format::kBits;
  } else if constexpr (Format::kHighBits == 2) {
    for (int g = 0; g < kGroups; g++) {
      const B v = load_line(high + g / 4 * kLine);
      codes[g] |= ((v >> (2 * (g % 4))) & 3) << Format::kBits;
    }
  }
}

// What scales and minimums of a tile's blocks are multiplied with.
template <class Format>
struct Factors {
  F scale, minimum;

  Factors(const uint8_t* tile, int lane) {
    const uint8_t* at = tile + Tile<Format>::kFactorAt + 2 * lane;
    scale = half(at);
    if constexpr (Format::kMinimums) minimum = half(at + 2 * kLanes);
  }

  F scale_of(const uint8_t* tile, int b, int s, int lane) const {
    using T = Tile<Format>;
    if constexpr (Format::kScale == Scale::half) return scale;
    const uint8_t* at = tile + T::kScaleAt + b * T::kScaleBytes + s * kLanes + lane;
    if constexpr (Format::kScale == Scale::bytes) return scale * widen(at);
    if constexpr (Format::kScale == Scale::nibbles) return scale * widen_nibbles(at, 0);
    return scale * widen_signed(at);
  }

  F minimum_of(const uint8_t* tile, int b, int s, int lane) const {
    using T = Tile<Format>;
    if constexpr (Format::kScale == Scale::bytes)
      return minimum * widen(tile + T::kMinimumAt + b * T::kScaleBytes + s * kLanes + lane);
    if constexpr (Format::kScale == Scale::nibbles)
      return minimum * widen_nibbles(tile + T::kScaleAt + b * T::kScaleBytes + s * kLanes + lane, 4);
    return minimum;
  }
};

template <class Format>
constexpr int kLargestCode = (1 << (Format::kBits + Format::kHighBits)) - 1;

// Adds block `b` of a tile times M rows to their sums.
template <class Format, int M>
inline void add_block(const uint8_t* tile, int b, int lane, const Factors<Format>& factors,
                      const Activations* a, int64_t stride, F* sums) {
  constexpr int kScales = Format::kScales, kPer = kGroups / 2;
  B codes[kGroups];
  unpack<Format>(tile, b, lane, codes);
  F scales[kScales], minimums[kScales] = {};
  for (int s = 0; s < kScales; s++) {
    scales[s] = factors.scale_of(tile, b, s, lane);
    if constexpr (Format::kMinimums) minimums[s] = factors.minimum_of(tile, b, s, lane);
  }
#pragma GCC unroll 16
  for (int r = 0; r < M; r++) {
    const Activations& x = a[r * stride];
    F halves[2];
    for (int s = 0; s < 2; s++) {
      const I start = begin<Format::kZero>(x.negated_sums[s]);
      halves[s] = __builtin_convertvector(
          dots<kPer, kLargestCode<Format>>(start, codes + s * kPer, x.codes + s * kShare), F);
    }
    if constexpr (kScales == 1) {
      const F t = fma(halves[1], splat(x.scales[1]), halves[0] * splat(x.scales[0]));
      sums[r] = fma(t, scales[0], sums[r]);
      if constexpr (Format::kMinimums) sums[r] = fma(minimums[0], splat(x.negated_sum), sums[r]);
    } else {
      for (int s = 0; s < 2; s++) {
        F t = halves[s] * scales[s];
        if constexpr (Format::kMinimums)
          t = fma(minimums[s], splat(static_cast<float>(x.negated_sums[s])), t);
        sums[r] = fma(t, splat(x.scales[s]), sums[r]);
      }
    }
  }
}

constexpr int kAhead = 2368 * 4;  // bytes that memory is asked for before they are needed

template <class Format, int M>
void tile_product(const uint8_t* tiles, int64_t tile_count, const Activations* a, int64_t stride, float* y) {
  using T = Tile<Format>;
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    F sums[M] = {};
    const uint8_t* tile = tiles;
    for (int64_t i = 0; i < tile_count; i++, tile += T::kBytes) {
      const Factors<Format> factors(tile, lane);
      const Activations* block = a + i * Format::kSubBlocks;
#pragma GCC unroll 1
      for (int b = 0; b < Format::kSubBlocks; b++) {
        constexpr int kPart = (T::kBytes + Format::kSubBlocks - 1) / Format::kSubBlocks;
        if (lane == 0)
          for (int p = 0; p < kPart; p += kLine) __builtin_prefetch(tile + kAhead + b * kPart + p);
        add_block<Format, M>(tile, b, lane, factors, block + b, stride, sums);
      }
    }
    for (int r = 0; r < M; r++) store(y + r * kLanes + lane, sums[r]);
  }
}

typedef void (*TileProduct)(const uint8_t*, int64_t, const Activations*, int64_t, float*);

template <class Format>
TileProduct tile_product_of(int64_t rows) {
  switch (rows) {
    case 1: return tile_product<Format, 1>;
    case 2: return tile_product<Format, 2>;
    case 3: return tile_product<Format, 3>;
    case 4: return tile_product<Format, 4>;
  }
  if constexpr (kRows > 4) {
    switch (rows) {
      case 5: return tile_product<Format, 5>;
      case 6: return tile_product<Format, 6>;
      case 7: return tile_product<Format, 7>;
      case 8: return tile_product<Format, 8>;
    }
  }
  return nullptr;
}

typedef TileProduct (*TileProductOf)(int64_t);
#define EDGESPEC_PRODUCT(name) tile_product_of<name>,
constexpr TileProductOf kTileProducts[] = {EDGESPEC_FORMATS(EDGESPEC_PRODUCT)};
#undef EDGESPEC_PRODUCT

struct Place {
  const Part* part;
  int64_t tile;    // in the part
  int64_t column;  // of y
};

inline Place place_of(const Projection& p, int64_t tile) {
  int64_t column = 0;
  const Part* part = p.parts;
  while (tile >= part->tile_count()) {
    tile -= part->tile_count();
    column += part->columns;
    part++;
  }
  return {part, tile, column + tile * kLanes};
}

inline void multiply(const Projection& p, const Part& part, int64_t tile, int64_t row, int64_t rows, float* y) {
  const FormatInfo& format = kFormats[part.format];
  const int64_t count = p.inputs / format.inputs, stride = p.inputs / kBlock;
  const TileProduct product = kTileProducts[part.format](rows);
  product(part.tiles + tile * count * format.bytes, count, p.activations + row * stride, stride, y);
}

// Bias, activation, residual; what lies in `sums` (rows, 16), and for gates in `others`, goes to y.
inline void finish(const Projection& p, const Place& at, int64_t row, int64_t rows, const float* sums,
                   const float* others) {
  const int64_t last = at.part->columns - at.tile * kLanes;
  const int64_t columns = last < kLanes ? last : kLanes;
  for (int64_t r = 0; r < rows; r++) {
    float values[kLanes];
    for (int h = 0; h < kHalves; h++) {
      F v = load(sums + r * kLanes + h * kWidth);
      if (others != nullptr) v = activate(v, p.gate) * load(others + r * kLanes + h * kWidth);
      store(values + h * kWidth, v);
    }
    const int64_t to = (row + r) * p.width + at.column;
    for (int64_t c = 0; c < columns; c++) {
      float v = values[c];
      if (p.bias != nullptr) v = v + p.bias[at.column + c];
      if (p.residual != nullptr) v = v + p.residual[to + c];
      p.y[to + c] = v;
    }
  }
}

void project(const Projection& p, int64_t first, int64_t last) {
  const int64_t groups = (p.rows + kRows - 1) / kRows;
  const int64_t half_parts = p.part_count / 2;
  for (int64_t tile = first; tile < last; tile++) {
    const Place at = place_of(p, tile);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t row = p.rows * g / groups, rows = p.rows * (g + 1) / groups - row;
      float sums[kRows * kLanes], others[kRows * kLanes];
      multiply(p, *at.part, at.tile, row, rows, sums);
      const bool gated = p.gate != Gate::none;
      if (gated) multiply(p, at.part[half_parts], at.tile, row, rows, others);
      finish(p, at, row, rows, sums, gated ? others : nullptr);
    }
  }
}

// ---- Attention -----------------------------------------------------------------------------------------

// Products of M queries with the keys of T tiles of 16.
template <int M, int T>
inline void key_products(const HeadAttention& h, const float* queries, int64_t tile, float* scores,
                         int64_t stride) {
  const float* keys = h.keys + tile * kLanes * h.head_dim;
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    F sums[M][T] = {};
    for (int64_t d = 0; d < h.head_dim; d++)
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        const F k = load(keys + (t * h.head_dim + d) * kLanes + lane);
#pragma GCC unroll 16
        for (int r = 0; r < M; r++) sums[r][t] = fma(splat(queries[r * h.head_dim + d]), k, sums[r][t]);
      }
    for (int r = 0; r < M; r++)
      for (int t = 0; t < T; t++) store(scores + r * stride + (tile + t) * kLanes + lane, sums[r][t]);
  }
}

// y += probabilities times the values of channels `d` to `d + D * kWidth`.
template <int M, int D>
inline void value_sums(const HeadAttention& h, const float* scores, int64_t stride, int64_t first,
                       int64_t last, int64_t d, float* y) {
  F sums[M][D] = {};
  for (int64_t k = first; k < last; k++)
#pragma GCC unroll 16
    for (int c = 0; c < D; c++) {
      const F v = load(h.values + k * h.head_dim + d + c * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < M; r++) sums[r][c] = fma(splat(scores[r * stride + k]), v, sums[r][c]);
    }
  for (int r = 0; r < M; r++)
    for (int c = 0; c < D; c++) store(y + r * h.stride + d + c * kWidth, sums[r][c]);
}

// Scores of one row, keys `first` to `end`, to probabilities; `limit` is where the row's keys end.
inline void soften(float* scores, int64_t begin_tile, int64_t end_tile, int64_t first, int64_t limit) {
  const float lowest = -__builtin_inff();
  for (int64_t k = begin_tile * kLanes; k < first; k++) scores[k] = lowest;
  for (int64_t k = limit; k < end_tile * kLanes; k++) scores[k] = lowest;
  float largest = lowest;
  for (int64_t k = first; k < limit; k++) largest = scores[k] > largest ? scores[k] : largest;
  F totals[kHalves] = {};
  for (int64_t k = begin_tile * kLanes; k < end_tile * kLanes; k += kLanes)
    for (int h = 0; h < kHalves; h++) {
      const F p = exponential(load(scores + k + h * kWidth) - largest);
      totals[h] = totals[h] + p;
      store(scores + k + h * kWidth, p);
    }
  float lanes[kLanes];
  for (int h = 0; h < kHalves; h++) store(lanes + h * kWidth, totals[h]);
  const float factor = 1.0f / add_lanes(lanes);
  for (int64_t k = begin_tile * kLanes; k < end_tile * kLanes; k++) scores[k] = scores[k] * factor;
}

template <int M>
void attend_rows(const HeadAttention& h, int64_t row) {
  constexpr int kTiles = M == 1 ? 8 : M == 2 ? 4 : M <= 4 ? 2 : 1;
  constexpr int kChannels = kTiles;
  const int64_t end = h.past + row + M;
  const int64_t first = h.window > 0 && end - M + 1 > h.window ? end - M + 1 - h.window : 0;
  const int64_t begin_tile = first / kLanes, end_tile = (end + kLanes - 1) / kLanes;
  const int64_t stride = (end_tile + 8) * kLanes;
  const float* queries = h.queries + row * h.head_dim;
  float* y = h.y + row * h.stride;
  int64_t tile = begin_tile;
  for (; tile + kTiles <= end_tile; tile += kTiles)
    key_products<M, kTiles>(h, queries, tile, h.scratch, stride);
  for (; tile < end_tile; tile++) key_products<M, 1>(h, queries, tile, h.scratch, stride);
  for (int r = 0; r < M; r++) {
    const int64_t limit = end - M + 1 + r;
    const int64_t start = h.window > 0 && limit > h.window ? limit - h.window : 0;
    soften(h.scratch + r * stride, begin_tile, end_tile, start, limit);
  }
  int64_t d = 0;
  for (; d + kChannels * kWidth <= h.head_dim; d += kChannels * kWidth)
    value_sums<M, kChannels>(h, h.scratch, stride, first, end, d, y);
  for (; d + kWidth <= h.head_dim; d += kWidth) value_sums<M, 1>(h, h.scratch, stride, first, end, d, y);
  for (; d < h.head_dim; d++)
    for (int r = 0; r < M; r++) {
      float sum = 0.0f;
      for (int64_t k = first; k < end; k++)
        sum = __builtin_fmaf(h.scratch[r * stride + k], h.values[k * h.head_dim + d], sum);
      y[r * h.stride + d] = sum;
    }
}

void attend(const HeadAttention& h) {
  for (int64_t row = 0; row < h.rows;) {
    const int64_t left = h.rows - row;
    if (left >= 8) {
      attend_rows<8>(h, row);
      row += 8;
    } else if (left >= 4) {
      attend_rows<4>(h, row);
      row += 4;
    } else if (left >= 2) {
      attend_rows<2>(h, row);
      row += 2;
    } else {
      attend_rows<1>(h, row);
      row += 1;
    }
  }
}

// ---- Rows of a matrix, and the largest of many ---------------------------------------------------------

template <class Format>
void gather_row(const uint8_t* tile, int64_t tile_count, int lane, float factor, float* y) {
  using T = Tile<Format>;
  const int first = lane / kWidth * kWidth, column = lane % kWidth;
  for (int64_t i = 0; i < tile_count; i++, tile += T::kBytes) {
    const Factors<Format> factors(tile, first);
    for (int b = 0; b < Format::kSubBlocks; b++) {
      B codes[kGroups];
      unpack<Format>(tile, b, first, codes);
      for (int k = 0; k < kBlock; k++) {
        const int s = k * Format::kScales / kBlock;
        const float scale = factors.scale_of(tile, b, s, first)[column];
        const int code = codes[k / 4][4 * column + k % 4];
        float v = scale * static_cast<float>(code - Format::kZero);
        if constexpr (Format::kMinimums) v = v - factors.minimum_of(tile, b, s, first)[column];
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
  for (; i + kWidth <= count; i += kWidth) {
    const F v = load(x + i);
    most = v > most ? v : most;
  }
  float best = -__builtin_inff();
  for (int l = 0; l < kWidth; l++) best = most[l] > best ? most[l] : best;
  for (; i < count; i++) best = x[i] > best ? x[i] : best;
  int64_t at = 0;
  while (at < count && x[at] != best) at++;
  *value = at < count ? x[at] : best;  // the first zero's sign, where the largest are zeros of both
  *index = at < count ? at : 0;
}

float sum_exp(const float* x, int64_t count, float most) {
  F totals[kHalves] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int h = 0; h < kHalves; h++)
      totals[h] = totals[h] + exponential(load(x + i + h * kWidth) - most);
  float lanes[kLanes], rest[kLanes];
  for (int l = 0; l < kLanes; l++) rest[l] = i + l < count ? x[i + l] : -__builtin_inff();
  for (int h = 0; h < kHalves; h++) {
    totals[h] = totals[h] + exponential(load(rest + h * kWidth) - most);
    store(lanes + h * kWidth, totals[h]);
  }
  return add_lanes(lanes);
}
