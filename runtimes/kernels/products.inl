// Products of rounded activations with tiles. Part of generic.inl.

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
  if constexpr (requires { Format::kTable; })
    for (int g = 0; g < kGroups; g++) codes[g] = look_up(Format::kTable, codes[g]);
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
    const uint8_t* at = tile + Tile<Format>::kFactorAt;
    scale = Tile<Format>::kExponents ? power(at + lane) : half(at + 2 * lane);
    if constexpr (Format::kMinimums) minimum = half(at + 2 * (kLanes + lane));
  }

  F scale_of(const uint8_t* tile, int b, int s, int lane) const {
    using T = Tile<Format>;
    if constexpr (T::kFactorIsScale) return scale;
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
constexpr int kLargestCode =
    requires { Format::kTable; } ? 2 * Format::kZero : (1 << (Format::kBits + Format::kHighBits)) - 1;

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

