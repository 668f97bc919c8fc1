// Products of rounded activations with tiles. Part of generic.inl.

// Shifts bytes left, or right by a negative number, and keeps the bits of `mask`.
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
    if constexpr (Format::kHighBits == 1) codes[i] |= shifted(load_line(high), kBits - g, 1 << kBits);
    if constexpr (Format::kHighBits == 2)
      codes[i] |= shifted(load_line(high + g / 4 * kLine), kBits - 2 * (g % 4), 3 << kBits);
    if constexpr (requires { Format::kTable; }) codes[i] = look_up(Format::kTable, codes[i]);
  }
}

// The factors of the scales and minimums of a tile's blocks.
template <class Format>
struct Factors {
  F scale, minimum;

  explicit Factors(const uint8_t* tile) {
    const uint8_t* at = tile + Tile<Format>::kFactorAt;
    scale = Tile<Format>::kExponents ? power(at) : half(at);
    if constexpr (requires { Format::kUnit; }) scale = scale * Format::kUnit;
    if constexpr (Format::kMinimums) minimum = half(at + 2 * kLanes);
  }

  F scale_of(const uint8_t* tile, int b, int s) const {
    using T = Tile<Format>;
    if constexpr (T::kFactorIsScale) return scale;
    const uint8_t* at = tile + T::kScaleAt + b * T::kScaleBytes + s * kLanes;
    if constexpr (Format::kScale == Scale::bytes) return scale * widen(at);
    if constexpr (Format::kScale == Scale::nibbles) return scale * widen_nibbles(at, 0);
    if constexpr (Format::kScale == Scale::small_floats) return scale * small_floats(at);
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

// A block of a tile as it lies in memory, unpacked when it is needed.
template <class Format>
struct Packed {
  const uint8_t* tile;
  int b;
  const Factors<Format>& factors;

  void codes(int pair, B* to) const { unpack<Format>(tile, b, pair, to); }
  F scale(int s) const { return factors.scale_of(tile, b, s); }
  F minimum(int s) const { return factors.minimum_of(tile, b, s); }
};

// An unpacked block, for several groups of rows.
template <class Format>
struct Unpacked {
  B all[kGroups];
  F scales[Format::kScales], minimums[Format::kScales];

  explicit Unpacked(const Packed<Format>& block) {
#pragma GCC unroll 4
    for (int pair = 0; pair < kGroups / 2; pair++) block.codes(pair, all + 2 * pair);
#pragma GCC unroll 2
    for (int s = 0; s < Format::kScales; s++) {
      scales[s] = block.scale(s);
      if constexpr (Format::kMinimums) minimums[s] = block.minimum(s);
    }
  }

  void codes(int pair, B* to) const { to[0] = all[2 * pair], to[1] = all[2 * pair + 1]; }
  F scale(int s) const { return scales[s]; }
  F minimum(int s) const { return minimums[s]; }
};

// Adds a block times M rows to their sums.
template <class Format, int M, class Block>
inline void add_block(const Block& block, const Activations* a, F* sums) {
  I dots[2][M];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) dots[half][r] = begin<Format>(a[r], half);
#pragma GCC unroll 2
    for (int pair = 2 * half; pair < 2 * half + 2; pair++) {
      B codes[2];
      block.codes(pair, codes);
      add<Format, M>(dots[half], codes, a, 2 * pair);
    }
    settle<Format, M>(dots[half], a, half);
    if (Format::kScales == 1 && half == 0) continue;
    const int s = half * (Format::kScales - 1);
    const F scale = block.scale(s);
    const F minimum = Format::kMinimums ? block.minimum(s) : F{};
#pragma GCC unroll 8
    for (int r = 0; r < M; r++) {
      const Activations& x = a[r];
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

// How far behind a tile memory is prefetched: of tiles of Q4_K three for a single row, four for several. For a single
// row two take up to a quarter longer, and four up to a tenth.
template <int M>
constexpr int64_t kAhead = 2368 * (M == 1 ? 3 : 4);

// Prefetches the part that lies kAhead<M> behind block `b`.
template <class Format, int M>
inline void ask_ahead(const uint8_t* tile, int b) {
  constexpr int kPart = (Tile<Format>::kBytes + Format::kSubBlocks - 1) / Format::kSubBlocks;
  for (int p = 0; p < kPart; p += kLine) prefetch(tile, kAhead<M> + b * kPart + p);
}

// Writes the products of M rows with the 16 columns of tiles to y (M, 16), without the rows' factors.
template <class Format, int M>
void few_rows(const uint8_t* tile, int64_t tile_count, const Activations* a, int64_t stride, F* y) {
  F sums[M];
  for (int r = 0; r < M; r++) sums[r] = F{};
  for (int64_t i = 0; i < tile_count; i++, tile += Tile<Format>::kBytes) {
    const Factors<Format> factors(tile);
#pragma GCC unroll 1
    for (int b = 0; b < Format::kSubBlocks; b++, a += stride) {
      ask_ahead<Format, M>(tile, b);
      add_block<Format, M>(Packed<Format>{tile, b, factors}, a, sums);
    }
  }
  for (int r = 0; r < M; r++) y[r] = sums[r];
}

// Adds a block times a group of rows. Groups have kRows rows or a few less.
template <class Format, int M = kRows>
inline void add_group(int64_t rows, const Unpacked<Format>& block, const Activations* a, F* sums) {
  if (rows == M) return add_block<Format, M>(block, a, sums);
  if constexpr (M > (kRows + 1) / 2) add_group<Format, M - 1>(rows, block, a, sums);
}

// The same for more rows than registers hold. Every group of rows reads a block while its unpacked codes and scales
// lie in the nearest cache, and meanwhile memory brings the next block.
template <class Format>
void many_rows(const uint8_t* tile, int64_t tile_count, const Activations* a, int64_t stride, int64_t rows, F* y) {
  const int64_t groups = (rows + kRows - 1) / kRows, least = rows / groups, more = rows % groups;
  for (int64_t r = 0; r < rows; r++) y[r] = F{};
  for (int64_t i = 0; i < tile_count; i++, tile += Tile<Format>::kBytes) {
    const Factors<Format> factors(tile);
#pragma GCC unroll 1
    for (int b = 0; b < Format::kSubBlocks; b++, a += stride) {
      ask_ahead<Format, kRows>(tile, b);
      const Unpacked<Format> block(Packed<Format>{tile, b, factors});
      for (int64_t g = 0, r = 0; g < groups; g++) {
        const int64_t size = least + (g < more ? 1 : 0);
        add_group<Format>(size, block, a + r, y + r);
        r += size;
      }
    }
  }
}

template <class Format, int M = kRows>
void product_of(const uint8_t* tile, int64_t tile_count, const Activations* a, int64_t stride, int64_t rows, F* y) {
  if (rows > kRows) return many_rows<Format>(tile, tile_count, a, stride, rows, y);
  if (rows == M) return few_rows<Format, M>(tile, tile_count, a, stride, y);
  if constexpr (M > 1) product_of<Format, M - 1>(tile, tile_count, a, stride, rows, y);
}

typedef void (*Product)(const uint8_t*, int64_t, const Activations*, int64_t, int64_t, F*);
#define EDGESPEC_PRODUCT(name) product_of<name>,
constexpr Product kProducts[] = {EDGESPEC_FORMATS(EDGESPEC_PRODUCT)};
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

// The products of up to kAtOnce rows with the 16 columns of a tile and of the tiles behind it along the inputs.
constexpr int64_t kAtOnce = 48;

inline void multiply(const Projection& p, const Part& part, int64_t tile, int64_t row, int64_t rows, F* y) {
  const FormatInfo& format = kFormats[part.format];
  const int64_t count = p.inputs / format.inputs;
  const uint8_t* tiles = part.tiles + tile * count * format.bytes;
  kProducts[part.format](tiles, count, p.activations + row, p.stride, rows, y);
  for (int64_t r = 0; r < rows; r++) y[r] = y[r] * p.factors[row + r];
}

// Writes `sums` (rows, 16) to y with bias, activation and residual; with a gate also `others`.
inline void finish(const Projection& p, const Place& at, int64_t row, int64_t rows, const F* sums, const F* others) {
  const int64_t last = at.part->columns - at.tile * kLanes;
  const int64_t columns = last < kLanes ? last : kLanes;
  const auto some = [&](const float* p) {
    if (columns == kLanes) return load(p);
    F v = {};
    __builtin_memcpy(&v, p, sizeof(float) * static_cast<size_t>(columns));
    return v;
  };
  for (int64_t r = 0; r < rows; r++) {
    F v = sums[r];
    const int64_t to = (row + r) * p.width + at.column;
    if (p.bias != nullptr) v = v + some(p.bias + at.column);
    if (others != nullptr)
      v = gated(v, p.other_bias != nullptr ? others[r] + some(p.other_bias + at.column) : others[r], p.gate);
    if (p.gate == Gate::squared) v = squared(v);
    if (p.gate == Gate::xielu) v = xielu(v, p.bend);
    if (p.residual != nullptr) v = v + some(p.residual + to);
    if (columns == kLanes)
      store(p.y + to, v);
    else
      __builtin_memcpy(p.y + to, &v, sizeof(float) * static_cast<size_t>(columns));
  }
}

// Some rows meet all tiles before the next rows do: tiles of a piece stay in a near cache, where many rows do not fit.
void project(const Projection& p, int64_t first, int64_t last) {
  const int64_t half_parts = p.part_count / 2;
  const bool gated = has_factor(p.gate);
  for (int64_t row = 0; row < p.rows; row += kAtOnce) {
    const int64_t rows = p.rows - row < kAtOnce ? p.rows - row : kAtOnce;
    for (int64_t tile = first; tile < last; tile++) {
      const Place at = place_of(p, tile);
      F sums[kAtOnce], others[kAtOnce];
      multiply(p, *at.part, at.tile, row, rows, sums);
      if (gated) multiply(p, at.part[half_parts], at.tile, row, rows, others);
      finish(p, at, row, rows, sums, gated ? others : nullptr);
    }
  }
}
