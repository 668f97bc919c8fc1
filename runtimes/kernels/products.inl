// Products of rounded activations with tiles. Part of generic.inl.

// Bytes that are shifted left, or right by a negative number, of which `mask` is kept.
inline B shifted(B v, int left, uint8_t mask) { return (left < 0 ? v >> -left : v << left) & mask; }

// The codes of two groups of block `b`.
template <class Format>
inline void unpack(const uint8_t* tile, int b, int pair, B* codes) {
  using T = Tile<Format>;
  constexpr int kBits = Format::kBits;
  const uint8_t* low = tile + b * T::kLowLines * kLine;
  const uint8_t* high = tile + T::kHigh + b * T::kHighLines * kLine;
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const int g = 2 * pair + i;
    const B v = load_line(low + g * kBits / 8 * kLine);
    codes[i] = kBits == 8 ? v : shifted(v, -g * kBits % 8, (1 << kBits) - 1);
    if constexpr (requires { Format::kTable; }) codes[i] = look_up(Format::kTable, codes[i]);
    if constexpr (Format::kHighBits == 1) codes[i] |= shifted(load_line(high), kBits - g, 1 << kBits);
    if constexpr (Format::kHighBits == 2)
      codes[i] |= shifted(load_line(high + g / 4 * kLine), kBits - 2 * (g % 4), 3 << kBits);
  }
}

// What scales and minimums of a tile's blocks are multiplied with.
template <class Format>
struct Factors {
  F scale, minimum;

  explicit Factors(const uint8_t* tile) {
    const uint8_t* at = tile + Tile<Format>::kFactorAt;
    scale = Tile<Format>::kExponents ? power(at) : half(at);
    if constexpr (Format::kMinimums) minimum = half(at + 2 * kLanes);
  }

  F scale_of(const uint8_t* tile, int b, int s) const {
    using T = Tile<Format>;
    if constexpr (T::kFactorIsScale) return scale;
    const uint8_t* at = tile + T::kScaleAt + b * T::kScaleBytes + s * kLanes;
    if constexpr (Format::kScale == Scale::bytes) return scale * widen(at);
    if constexpr (Format::kScale == Scale::nibbles) return scale * widen_nibbles(at, 0);
    return scale * widen_signed(at);
  }

  F minimum_of(const uint8_t* tile, int b, int s) const {
    using T = Tile<Format>;
    if constexpr (Format::kScale == Scale::bytes)
      return minimum * widen(tile + T::kMinimumAt + b * T::kScaleBytes + s * kLanes);
    if constexpr (Format::kScale == Scale::nibbles)
      return minimum * widen_nibbles(tile + T::kScaleAt + b * T::kScaleBytes + s * kLanes, 4);
    return minimum;
  }
};

// Adds block `b` of a tile times M rows to their sums.
template <class Format, int M>
inline void add_block(const uint8_t* tile, int b, const Factors<Format>& factors,
                      const Activations* a, int64_t stride, F* sums) {
  I dots[2][M];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) dots[half][r] = begin<Format>(a[r * stride], half);
#pragma GCC unroll 2
    for (int pair = 2 * half; pair < 2 * half + 2; pair++) {
      B codes[2];
      unpack<Format>(tile, b, pair, codes);
      add<Format, M>(dots[half], codes, a, stride, 2 * pair);
    }
    settle<Format, M>(dots[half], a, stride, half);
    if (Format::kScales == 1 && half == 0) continue;
    const int s = half * (Format::kScales - 1);
    const F scale = factors.scale_of(tile, b, s);
    const F minimum = Format::kMinimums ? factors.minimum_of(tile, b, s) : F{};
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const Activations& x = a[r * stride];
      const F dot = Format::kScales == 2 ? weigh<Format>(dots[half][r], x, half)
                                         : weigh<Format>(dots[0][r], dots[1][r], x);
      sums[r] = fma(dot, scale, sums[r]);
      if constexpr (Format::kMinimums) {
        const float half_sum = x.floats[half] * static_cast<float>(x.negated_sums[half]);
        sums[r] = fma(minimum, splat(Format::kScales == 2 ? half_sum : x.negated_sum), sums[r]);
      }
    }
  }
}

// How far behind a tile memory is asked. A single row is done with a tile sooner, and reads fastest so.
template <int M>
constexpr int64_t kAhead = 2368 * (M == 1 ? 2 : 4);

// Adds the products of M rows with the 16 columns of tiles, less the rows' factors, to y (M, 16).
template <class Format, int M>
void tile_product(const uint8_t* tile, int64_t tile_count, const Activations* a, int64_t stride, float* y) {
  using T = Tile<Format>;
  F sums[M];
  for (int r = 0; r < M; r++) sums[r] = load(y + r * kLanes);
  for (int64_t i = 0; i < tile_count; i++, tile += T::kBytes) {
    const Factors<Format> factors(tile);
#pragma GCC unroll 1
    for (int b = 0; b < Format::kSubBlocks; b++, a++) {
      constexpr int kPart = (T::kBytes + Format::kSubBlocks - 1) / Format::kSubBlocks;
      for (int p = 0; p < kPart; p += kLine) prefetch(tile, kAhead<M> + b * kPart + p);
      add_block<Format, M>(tile, b, factors, a, stride, sums);
    }
  }
  for (int r = 0; r < M; r++) store(y + r * kLanes, sums[r]);
}

typedef void (*TileProduct)(const uint8_t*, int64_t, const Activations*, int64_t, float*);

template <class Format, int M = kRows>
TileProduct tile_product_of(int64_t rows) {
  if (rows == M) return tile_product<Format, M>;
  if constexpr (M > 1) return tile_product_of<Format, M - 1>(rows);
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

// The products of up to kAtOnce rows with the 16 columns of a tile and those behind it along the inputs. A stretch
// of tiles meets all rows while it lies in the nearest cache; memory has that long to bring the next one.
constexpr int64_t kAtOnce = 48, kStretch = 8192;

inline void multiply(const Projection& p, const Part& part, int64_t tile, int64_t row, int64_t rows, float* y) {
  const FormatInfo& format = kFormats[part.format];
  const int64_t count = p.inputs / format.inputs, stride = p.inputs / kBlock, groups = (rows + kRows - 1) / kRows;
  static_assert(Tile<Q6_K>::kBytes <= kStretch);  // the largest
  const int64_t stretch = kStretch / format.bytes, blocks = format.inputs / kBlock;
  const uint8_t* tiles = part.tiles + tile * count * format.bytes;
  for (int64_t r = 0; r < rows; r++) store(y + r * kLanes, F{});
  for (int64_t i = 0; i < count; i += stretch)
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
      kTileProducts[part.format](last - first)(tiles + i * format.bytes, stretch < count - i ? stretch : count - i,
                                               p.activations + (row + first) * stride + i * blocks, stride,
                                               y + first * kLanes);
    }
  for (int64_t r = 0; r < rows; r++) store(y + r * kLanes, load(y + r * kLanes) * p.factors[row + r]);
}

// Bias, activation, residual; what lies in `sums` (rows, 16), and for gates in `others`, goes to y.
inline void finish(const Projection& p, const Place& at, int64_t row, int64_t rows, const float* sums,
                   const float* others) {
  const int64_t last = at.part->columns - at.tile * kLanes;
  const int64_t columns = last < kLanes ? last : kLanes;
  const auto some = [&](const float* p) {
    if (columns == kLanes) return load(p);
    F v = {};
    __builtin_memcpy(&v, p, sizeof(float) * static_cast<size_t>(columns));
    return v;
  };
  for (int64_t r = 0; r < rows; r++) {
    F v = load(sums + r * kLanes);
    if (others != nullptr) v = activate(v, p.gate) * load(others + r * kLanes);
    const int64_t to = (row + r) * p.width + at.column;
    if (p.bias != nullptr) v = v + some(p.bias + at.column);
    if (p.residual != nullptr) v = v + some(p.residual + to);
    if (columns == kLanes)
      store(p.y + to, v);
    else
      __builtin_memcpy(p.y + to, &v, sizeof(float) * static_cast<size_t>(columns));
  }
}

void project(const Projection& p, int64_t first, int64_t last) {
  const int64_t half_parts = p.part_count / 2;
  const bool gated = p.gate != Gate::none;
  for (int64_t tile = first; tile < last; tile++) {
    const Place at = place_of(p, tile);
    for (int64_t row = 0; row < p.rows; row += kAtOnce) {
      const int64_t rows = p.rows - row < kAtOnce ? p.rows - row : kAtOnce;
      float sums[kAtOnce * kLanes], others[kAtOnce * kLanes];
      multiply(p, *at.part, at.tile, row, rows, sums);
      if (gated) multiply(p, at.part[half_parts], at.tile, row, rows, others);
      finish(p, at, row, rows, sums, gated ? others : nullptr);
    }
  }
}
