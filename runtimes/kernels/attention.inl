// Attention of queries that share keys and values. Part of generic.inl.
//
// All queries read a stretch of keys, and later of values, while it lies in the nearest cache; the next stretch is
// prefetched meanwhile. Sums go on from stretch to stretch, so that each sum has one order.

constexpr int64_t kValueBytes = 16 << 10;  // bytes of a stretch of values
constexpr int64_t kHalves = 2 * kLanes;     // bytes of 16 float16

// Scores of M queries with T tiles of 16 keys of float16. Keys `ahead` bytes behind them are prefetched.
template <int M, int T>
inline void key_products(const uint8_t* keys, int64_t row, int64_t ahead, const float* queries, int64_t head_dim,
                         float* scores, int64_t stride) {
  F sums[M][T] = {};
  for (int64_t d = 0; d < head_dim; d++) {
    F k[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      const uint8_t* at = keys + t * row * kLanes + d * kHalves;
      k[t] = half(at);
      if (d % 2 == 0) prefetch(at, ahead);
    }
#pragma GCC unroll 16
    for (int q = 0; q < M; q++) {
      const F x = splat(queries[q * head_dim + d]);
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) sums[q][t] = fma(x, k[t], sums[q][t]);
    }
  }
  for (int q = 0; q < M; q++)
    for (int t = 0; t < T; t++) store(scores + q * stride + t * kLanes, sums[q][t]);
}

// The same with keys of float16 that lie row by row.
template <int M, int T>
inline void row_products(const uint8_t* keys, int64_t row, int64_t ahead, const float* queries, int64_t head_dim,
                         float* scores, int64_t stride) {
  for (int64_t k = 0; k < T * kLanes; k += T) {
    F sums[M][T] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      F key[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        const uint8_t* at = keys + (k + t) * row + d / kLanes * kHalves;
        key[t] = half(at);
        if (d % (2 * kLanes) == 0) prefetch(at, ahead);
      }
#pragma GCC unroll 16
      for (int q = 0; q < M; q++) {
        const F x = load(queries + q * head_dim + d);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sums[q][t] = fma(x, key[t], sums[q][t]);
      }
    }
    for (int q = 0; q < M; q++)
      for (int t = 0; t < T; t++) {
        float lanes[kLanes];
        store(lanes, sums[q][t]);
        scores[q * stride + k + t] = add_lanes(lanes);
      }
  }
}

// Adds M queries' shares of `count` values of float16, in D vectors of channels, to y. Values `ahead` bytes behind them are
// prefetched.
template <int M, int D>
inline void value_sums(const uint8_t* values, int64_t row, int64_t ahead, int64_t count, const float* shares,
                       int64_t stride, int64_t head_dim, int64_t first, float* y) {
  F sums[M][D];
  y += first;
  for (int q = 0; q < M; q++)
    for (int c = 0; c < D; c++) sums[q][c] = load(y + q * head_dim + c * kLanes);
  for (int64_t k = 0; k < count; k++, values += row) {
    F v[D];
#pragma GCC unroll 16
    for (int c = 0; c < D; c++) {
      const uint8_t* at = values + (first / kLanes + c) * kHalves;
      v[c] = half(at);
      if (c % 2 == 0) prefetch(at, ahead);
    }
#pragma GCC unroll 16
    for (int q = 0; q < M; q++) {
      const F share = splat(shares[q * stride + k]);
#pragma GCC unroll 16
      for (int c = 0; c < D; c++) sums[q][c] = fma(share, v[c], sums[q][c]);
    }
  }
  for (int q = 0; q < M; q++)
    for (int c = 0; c < D; c++) store(y + q * head_dim + c * kLanes, sums[q][c]);
}

// The last channels, which do not fill a vector.
template <int M>
inline void last_value_sums(const uint8_t* values, int64_t row, int64_t count, const float* shares, int64_t stride,
                            int64_t head_dim, size_t channels, float* y) {
  F sums[M] = {};
  for (int q = 0; q < M; q++) __builtin_memcpy(&sums[q], y + q * head_dim, sizeof(float) * channels);
  for (int64_t k = 0; k < count; k++) {
    uint8_t filled[kHalves] = {};
    __builtin_memcpy(filled, values + k * row, sizeof(Half) * channels);
    const F v = half(filled);
    for (int q = 0; q < M; q++) sums[q] = fma(splat(shares[q * stride + k]), v, sums[q]);
  }
  for (int q = 0; q < M; q++) __builtin_memcpy(y + q * head_dim, &sums[q], sizeof(float) * channels);
}

// The number of tiles or vectors that are computed at once; their rest is computed by half as many, and so on. Each
// sum is a chain of additions, and a single chain would wait for every addition.
constexpr int at_once(int queries) { return queries < kSums / 8 ? 8 : kSums / queries; }

// Scores of M queries, from number `first` on, with the tiles of a run.
template <int M, int T = at_once(M)>
void score(const Queries& q, int64_t first, Run run) {
  constexpr int64_t count = T * kLanes;
  const int64_t row = q.key_table.row;
  const float* queries = q.vectors + first * q.head_dim;
  for (; run.from + count <= run.to; run.from += count, run.place += count * row) {
    float* scores = q.scores + first * q.stride + run.from - q.begin;
    if (q.keys == nullptr)
      row_products<M, T>(q.values + run.place, row, run.ahead, queries, q.head_dim, scores, q.stride);
    else
      key_products<M, T>(q.keys + run.place, row, run.ahead, queries, q.head_dim, scores, q.stride);
  }
  if constexpr (T > 1) score<M, T / 2>(q, first, run);
}

// Adds the queries' shares of a run's values, from channel `d` on.
template <int M, int D = at_once(M)>
void gather_values(const Queries& q, int64_t first, const Run& run, int64_t d) {
  const uint8_t* values = q.values + run.place;
  const float* shares = q.scores + first * q.stride + run.from - q.begin;
  const int64_t count = run.to - run.from;
  float* y = q.vectors + first * q.head_dim;
  const int64_t row = q.value_table.row;
  for (; d + D * kLanes <= q.value_dim; d += D * kLanes)
    value_sums<M, D>(values, row, run.ahead, count, shares, q.stride, q.head_dim, d, y);
  if constexpr (D > 1)
    gather_values<M, D / 2>(q, first, run, d);
  else if (d < q.value_dim)
    last_value_sums<M>(values + 2 * d, row, count, shares, q.stride, q.head_dim,
                       static_cast<size_t>(q.value_dim - d), y + d);
}

// Calls visit.template operator()<M>() with M equal to `count`.
template <int M = kQueries, class Visit>
void with_count(int64_t count, const Visit& visit) {
  if (count == M) return visit.template operator()<M>();
  if constexpr (M > 1) with_count<M - 1>(count, visit);
}

// Turns a query's scores of `count` tokens into shares; the query sees tokens `first` to `limit`. The share of a
// `sink` is lost. A `cap` is a soft bound of scores.
inline void soften(float* scores, int64_t count, int64_t first, int64_t limit, const float* sink, float cap) {
  const float lowest = -__builtin_inff();
  if (cap > 0.0f)
    for (int64_t k = 0; k < count; k += kLanes) store(scores + k, capped(load(scores + k), cap));
  for (int64_t k = 0; k < first; k++) scores[k] = lowest;
  for (int64_t k = limit; k < count; k++) scores[k] = lowest;
  F most = splat(lowest);
  for (int64_t k = 0; k < count; k += kLanes) {
    const F v = load(scores + k);
    most = v > most ? v : most;
  }
  const float seen = largest_lane(most), largest = sink != nullptr && *sink > seen ? *sink : seen;
  F totals = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const F share = exponential(load(scores + k) - largest);
    totals = totals + share;
    store(scores + k, share);
  }
  float lanes[kLanes];
  store(lanes, totals);
  float total = add_lanes(lanes);
  if (sink != nullptr) {
    store(lanes, exponential(splat(*sink - largest)));
    total = total + lanes[0];
  }
  const float factor = 1.0f / total;
  for (int64_t k = 0; k < count; k += kLanes) store(scores + k, load(scores + k) * factor);
}

// visit.template operator()<M>(first) for groups of queries of nearly the same size.
template <class Visit>
void each_group(const Queries& q, const Visit& visit) {
  const int64_t groups = (q.count + kQueries - 1) / kQueries;
  for (int64_t i = 0; i < groups; i++) {
    const int64_t first = q.count * i / groups;
    with_count(q.count * (i + 1) / groups - first, [&]<int M>() { visit.template operator()<M>(first); });
  }
}

// visit(run) for the runs of the tokens `from` to `to`, of `most` tokens or fewer.
template <class Visit>
void each_run(const Queries& q, const BlockTable& table, int64_t from, int64_t to, int64_t most, const Visit& visit) {
  while (from < to) {
    const Run run = q.run(table, from, from + most < to ? from + most : to);
    visit(run);
    from = run.to;
  }
}

inline void soften_all(const Queries& q, int64_t tokens) {
  for (int64_t i = 0; i < q.count; i++)
    soften(q.scores + i * q.stride, tokens, q.spans[i].first - q.begin, q.spans[i].limit - q.begin,
           q.sinks == nullptr ? nullptr : q.sinks + i, q.cap);
  __builtin_memset(q.vectors, 0, sizeof(float) * static_cast<size_t>(q.count * q.head_dim));
}

void attend_halves(const Queries& q) {
  const int64_t groups = (q.count + kQueries - 1) / kQueries, last = (q.end + kLanes - 1) / kLanes * kLanes;
  each_run(q, q.key_table, q.begin, last, at_once((q.count + groups - 1) / groups) * kLanes, [&](const Run& run) {
    each_group(q, [&]<int M>(int64_t first) { score<M>(q, first, run); });
  });
  soften_all(q, last - q.begin);
  // Values that all queries see are read once for all. A query skips values that it does not see, because a share of
  // 0 times NaN is NaN.
  int64_t common = q.begin, common_end = q.end;
  for (int64_t i = 0; i < q.count; i++) {
    const Span& span = q.spans[i];
    common = span.first > common ? span.first : common;
    common_end = span.limit < common_end ? span.limit : common_end;
  }
  common_end = common_end < common ? common : common_end;
  const auto alone = [&](int64_t from, int64_t to) {
    for (int64_t i = 0; i < q.count; i++) {
      const int64_t first = q.spans[i].first, limit = q.spans[i].limit;
      const int64_t begin = from < first ? first : from, end = to < limit ? to : limit;
      each_run(q, q.value_table, begin, end, q.end, [&](const Run& run) { gather_values<1>(q, i, run, 0); });
    }
  };
  alone(q.begin, common);
  const int64_t stretch = kValueBytes / q.value_table.row + 1;
  each_run(q, q.value_table, common, common_end, stretch, [&](const Run& run) {
    each_group(q, [&]<int M>(int64_t first) { gather_values<M>(q, first, run, 0); });
  });
  alone(common_end, q.end);
}

// ---- Keys and values of 8 bits: products of whole numbers ----------------------------------------------
//
// Both products have the same form: 16 lanes, which are tokens or channels, by 32 inputs, which are channels or tokens.
// Queries, and shares times the scales of their values, are rounded to 16 bits.

// 16 bfloat16.
inline F brains(const uint8_t* p) {
  typedef uint16_t Bits __attribute__((vector_size(2 * kLanes)));
  Bits v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_bit_cast(F, __builtin_convertvector(v, I) << 16);
}

// Rounds 32 numbers to whole multiples of a scale, which is returned. It is not finite if one of them is not.
inline float round_to_words(F first, F last, WordCodes* y) {
  const F magic = splat(12582912.0f);  // adding it rounds to a whole number
  // As whole numbers magnitudes have the same order, above which those lie that are no numbers.
  const I one = __builtin_bit_cast(I, first) & 0x7fffffff, other = __builtin_bit_cast(I, last) & 0x7fffffff;
  const I sizes = one > other ? one : other;
  int32_t lanes[kLanes];
  __builtin_memcpy(lanes, &sizes, sizeof lanes);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
  float largest;
  __builtin_memcpy(&largest, lanes, sizeof largest);
  const bool usable = largest > 1e-30f && largest <= 3.4028235e38f;
  const F per_unit = splat(usable ? kMostWord / largest : 0.0f);
  const auto whole = [&](F x) {
    return __builtin_convertvector(fma(usable ? x : F{}, per_unit, magic) - magic, I);
  };
  pack(whole(first), whole(last), y);
  return largest / kMostWord;
}

inline void prefetch_tile(const uint8_t* lines, int64_t ahead) {
  for (int i = 0; i < kGroups; i++) prefetch(lines + i * kLine, ahead);
}

// Scores of M queries with a run's keys.
template <int M>
void code_scores(const Queries& q, int64_t first, Run run) {
  const int64_t blocks = q.head_dim / kScaled;
  for (; run.from < run.to; run.from += kLanes, run.place += kLanes * q.key_table.row) {
    const uint8_t* lines = q.keys + run.place;
    const uint8_t* scales = lines + q.head_dim * kLanes;
    F totals[M] = {};
    for (int64_t b = 0; b < blocks; b++, lines += kScaled * kLanes, scales += 2 * kLanes) {
      prefetch_tile(lines, run.ahead);
      prefetch(scales, run.ahead);
      I sums[M];
      code_products<M>(lines, q.codes + first * blocks + b, blocks, sums);
      const F own = brains(scales);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++)
        totals[m] = fma(real(sums[m]) * splat(q.code_scales[(first + m) * blocks + b]), own, totals[m]);
    }
    for (int m = 0; m < M; m++) store(q.scores + (first + m) * q.stride + run.from - q.begin, totals[m]);
  }
}

// Adds M queries' shares of a block's values.
template <int M>
void code_sums(const Queries& q, int64_t first, const uint8_t* block, int64_t ahead) {
  float* y = q.vectors + first * q.head_dim;
  for (int64_t d = 0; d < q.head_dim; d += kLanes, block += kTokens * kLanes, y += kLanes) {
    prefetch_tile(block, ahead);
    I sums[M];
    code_products<M>(block, q.codes + first, 1, sums);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      float* to = y + m * q.head_dim;
      store(to, fma(real(sums[m]), splat(q.code_scales[first + m]), load(to)));
    }
  }
}

void attend_codes(const Queries& q) {
  const int64_t parts = q.head_dim / kScaled, last = (q.end + kTokens - 1) / kTokens * kTokens;
  for (int64_t i = 0; i < q.count * parts; i++) {
    const float* x = q.vectors + i * kScaled;
    q.code_scales[i] = round_to_words(load(x), load(x + kLanes), q.codes + i);
  }
  each_run(q, q.key_table, q.begin, last, kTokens, [&](const Run& run) {
    each_group(q, [&]<int M>(int64_t first) { code_scores<M>(q, first, run); });
  });
  soften_all(q, last - q.begin);
  each_run(q, q.value_table, q.begin, last, kTokens, [&](const Run& run) {
    const uint8_t* block = q.values + run.place;
    const uint8_t* scales = block + q.head_dim * kTokens;
    prefetch(scales, run.ahead);
    const F own[] = {brains(scales), brains(scales + 2 * kLanes)};
    for (int64_t i = 0; i < q.count; i++) {
      const float* shares = q.scores + i * q.stride + run.from - q.begin;
      const auto weights = [&](int k) {
        const F share = load(shares + k * kLanes);
        return share == 0.0f ? F{} : share * own[k];  // a value that a query does not see may be no number
      };
      q.code_scales[i] = round_to_words(weights(0), weights(1), q.codes + i);
    }
    each_group(q, [&]<int M>(int64_t first) { code_sums<M>(q, first, block, run.ahead); });
  });
}

void attend(const Queries& q) { q.cells == Cells::halves ? attend_halves(q) : attend_codes(q); }
