// Attention of queries that share keys and values. Part of generic.inl.
//
// All queries read a stretch of keys, and later of values, while it lies in the nearest cache; the next stretch is
// prefetched meanwhile. Sums go on from stretch to stretch, so that each sum has one order.

inline F load(const Half* p) { return half(reinterpret_cast<const uint8_t*>(p)); }

constexpr int64_t kValueBytes = 16 << 10;  // bytes of a stretch of values

// Scores of M queries with T tiles of 16 keys. Keys `ahead` bytes behind them are prefetched.
template <int M, int T>
inline void key_products(const Half* keys, int64_t ahead, const float* queries, int64_t head_dim, float* scores,
                         int64_t stride) {
  F sums[M][T] = {};
  for (int64_t d = 0; d < head_dim; d++) {
    F k[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      const Half* at = keys + (t * head_dim + d) * kLanes;
      k[t] = load(at);
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

// The same with keys that lie row by row.
template <int M, int T>
inline void row_products(const Half* keys, int64_t ahead, const float* queries, int64_t head_dim, float* scores,
                         int64_t stride) {
  for (int64_t k = 0; k < T * kLanes; k += T) {
    F sums[M][T] = {};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      F row[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        const Half* at = keys + (k + t) * head_dim + d;
        row[t] = load(at);
        if (d % (2 * kLanes) == 0) prefetch(at, ahead);
      }
#pragma GCC unroll 16
      for (int q = 0; q < M; q++) {
        const F x = load(queries + q * head_dim + d);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sums[q][t] = fma(x, row[t], sums[q][t]);
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

// Adds M queries' shares of `count` values, in D vectors of channels, to y. Values `ahead` bytes behind them are
// prefetched.
template <int M, int D>
inline void value_sums(const Half* values, int64_t ahead, int64_t count, const float* shares, int64_t stride,
                       int64_t head_dim, float* y) {
  F sums[M][D];
  for (int q = 0; q < M; q++)
    for (int c = 0; c < D; c++) sums[q][c] = load(y + q * head_dim + c * kLanes);
  for (int64_t k = 0; k < count; k++) {
    F v[D];
#pragma GCC unroll 16
    for (int c = 0; c < D; c++) {
      const Half* at = values + k * head_dim + c * kLanes;
      v[c] = load(at);
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
inline void last_value_sums(const Half* values, int64_t count, const float* shares, int64_t stride, int64_t head_dim,
                            size_t channels, float* y) {
  F sums[M] = {};
  for (int q = 0; q < M; q++) __builtin_memcpy(&sums[q], y + q * head_dim, sizeof(float) * channels);
  for (int64_t k = 0; k < count; k++) {
    Half filled[kLanes] = {};
    __builtin_memcpy(filled, values + k * head_dim, sizeof(Half) * channels);
    const F v = load(filled);
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
  const float* queries = q.vectors + first * q.head_dim;
  for (; run.from + count <= run.to; run.from += count, run.place += count * q.head_dim) {
    float* scores = q.scores + first * q.stride + run.from - q.begin;
    if (q.keys == nullptr)
      row_products<M, T>(q.values + run.place, run.ahead, queries, q.head_dim, scores, q.stride);
    else
      key_products<M, T>(q.keys + run.place, run.ahead, queries, q.head_dim, scores, q.stride);
  }
  if constexpr (T > 1) score<M, T / 2>(q, first, run);
}

// Adds the queries' shares of a run's values, from channel `d` on.
template <int M, int D = at_once(M)>
void gather_values(const Queries& q, int64_t first, const Run& run, int64_t d) {
  const Half* values = q.values + run.place;
  const float* shares = q.scores + first * q.stride + run.from - q.begin;
  const int64_t count = run.to - run.from;
  float* y = q.vectors + first * q.head_dim;
  for (; d + D * kLanes <= q.value_dim; d += D * kLanes)
    value_sums<M, D>(values + d, run.ahead, count, shares, q.stride, q.head_dim, y + d);
  if constexpr (D > 1)
    gather_values<M, D / 2>(q, first, run, d);
  else if (d < q.value_dim)
    last_value_sums<M>(values + d, count, shares, q.stride, q.head_dim, static_cast<size_t>(q.value_dim - d), y + d);
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

void attend(const Queries& q) {
  const int64_t groups = (q.count + kQueries - 1) / kQueries;
  const auto each_group = [&](const auto& visit) {
    for (int64_t i = 0; i < groups; i++) {
      const int64_t first = q.count * i / groups;
      with_count(q.count * (i + 1) / groups - first, [&]<int M>() { visit.template operator()<M>(first); });
    }
  };
  const auto each_run = [&](int64_t from, int64_t to, int64_t most, const auto& visit) {
    while (from < to) {
      const Run run = q.run(from, from + most < to ? from + most : to);
      visit(run);
      from = run.to;
    }
  };
  const int64_t last = (q.end + kLanes - 1) / kLanes * kLanes;
  each_run(q.begin, last, at_once((q.count + groups - 1) / groups) * kLanes, [&](const Run& run) {
    each_group([&]<int M>(int64_t first) { score<M>(q, first, run); });
  });
  // Values that all queries see are read once for all. A query skips values that it does not see, because a share of
  // 0 times NaN is NaN.
  int64_t common = q.begin, common_end = q.end;
  for (int64_t i = 0; i < q.count; i++) {
    const Span& span = q.spans[i];
    soften(q.scores + i * q.stride, last - q.begin, span.first - q.begin, span.limit - q.begin,
           q.sinks == nullptr ? nullptr : q.sinks + i, q.cap);
    common = span.first > common ? span.first : common;
    common_end = span.limit < common_end ? span.limit : common_end;
  }
  common_end = common_end < common ? common : common_end;
  __builtin_memset(q.vectors, 0, sizeof(float) * static_cast<size_t>(q.count * q.head_dim));
  const auto alone = [&](int64_t from, int64_t to) {
    for (int64_t i = 0; i < q.count; i++) {
      const int64_t first = q.spans[i].first, limit = q.spans[i].limit;
      const int64_t begin = from < first ? first : from, end = to < limit ? to : limit;
      each_run(begin, end, q.end, [&](const Run& run) { gather_values<1>(q, i, run, 0); });
    }
  };
  alone(q.begin, common);
  const int64_t stretch = kValueBytes / (static_cast<int64_t>(sizeof(Half)) * q.head_dim) + 1;
  each_run(common, common_end, stretch, [&](const Run& run) {
    each_group([&]<int M>(int64_t first) { gather_values<M>(q, first, run, 0); });
  });
  alone(common_end, q.end);
}
