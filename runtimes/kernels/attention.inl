// Attention of one query head. Part of generic.inl.

inline F load(const Half* p) { return half(reinterpret_cast<const uint8_t*>(p)); }

// Products of M queries with the keys of T tiles of 16.
template <int M, int T>
inline void key_products(const HeadAttention& h, const float* queries, int64_t tile, float* scores,
                         int64_t stride) {
  const Half* keys = h.keys + tile * kLanes * h.head_dim;
  F sums[M][T] = {};
  for (int64_t d = 0; d < h.head_dim; d++)
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      const F k = load(keys + (t * h.head_dim + d) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < M; r++) sums[r][t] = fma(splat(queries[r * h.head_dim + d]), k, sums[r][t]);
    }
  for (int r = 0; r < M; r++)
    for (int t = 0; t < T; t++) store(scores + r * stride + (tile + t) * kLanes, sums[r][t]);
}

// Keys `first` to `last` are those of M rows together, of which each sees but a part.
template <int M>
inline bool seen(const HeadAttention& h, int64_t r, int64_t k, int64_t last) {
  const int64_t limit = last - M + 1 + r;
  return k < limit && (h.window == 0 || k >= limit - h.window);
}

// y = probabilities times the values of channels `d` to `d + D * kLanes`. What a row does not see is left out,
// since nothing times a NaN is one.
template <int M, int D>
inline void value_sums(const HeadAttention& h, const float* scores, int64_t stride, int64_t first,
                       int64_t last, int64_t d, float* y) {
  F sums[M][D] = {};
  const int64_t common = h.window == 0 ? first : first + M - 1, some = last - M + 1;
  for (int64_t k = first; k < last; k++) {
    const bool all = k >= common && k < some;
#pragma GCC unroll 16
    for (int c = 0; c < D; c++) {
      const F v = load(h.values + k * h.head_dim + d + c * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < M; r++)
        if (all || seen<M>(h, r, k, last)) sums[r][c] = fma(splat(scores[r * stride + k]), v, sums[r][c]);
    }
  }
  for (int r = 0; r < M; r++)
    for (int c = 0; c < D; c++) store(y + r * h.stride + d + c * kLanes, sums[r][c]);
}

// The channels from `d` on, which fill no vector.
template <int M>
inline void last_value_sums(const HeadAttention& h, const float* scores, int64_t stride, int64_t first,
                            int64_t last, int64_t d, float* y) {
  const size_t channels = static_cast<size_t>(h.head_dim - d);
  F sums[M] = {};
  for (int64_t k = first; k < last; k++) {
    Half filled[kLanes] = {};
    __builtin_memcpy(filled, h.values + k * h.head_dim + d, sizeof(Half) * channels);
    const F v = load(filled);
    for (int r = 0; r < M; r++)
      if (seen<M>(h, r, k, last)) sums[r] = fma(splat(scores[r * stride + k]), v, sums[r]);
  }
  for (int r = 0; r < M; r++) __builtin_memcpy(y + r * h.stride + d, &sums[r], sizeof(float) * channels);
}

// Scores and sums of values are taken as many tiles and vectors at once as there are, up to T and D, then half
// as many and so on: each is a chain of additions, and one alone would wait for each to end.
template <int M, int T>
inline void all_key_products(const HeadAttention& h, const float* queries, int64_t tile, int64_t end_tile,
                             float* scores, int64_t stride) {
  for (; tile + T <= end_tile; tile += T) key_products<M, T>(h, queries, tile, scores, stride);
  if constexpr (T > 1) all_key_products<M, T / 2>(h, queries, tile, end_tile, scores, stride);
}

template <int M, int D>
inline void all_value_sums(const HeadAttention& h, const float* scores, int64_t stride, int64_t first,
                           int64_t last, int64_t d, float* y) {
  for (; d + D * kLanes <= h.head_dim; d += D * kLanes)
    value_sums<M, D>(h, scores, stride, first, last, d, y);
  if constexpr (D > 1)
    all_value_sums<M, D / 2>(h, scores, stride, first, last, d, y);
  else if (d < h.head_dim)
    last_value_sums<M>(h, scores, stride, first, last, d, y);
}

// Scores of one row, keys `first` to `end`, to probabilities; `limit` is where the row's keys end.
inline void soften(float* scores, int64_t begin_tile, int64_t end_tile, int64_t first, int64_t limit) {
  const float lowest = -__builtin_inff();
  for (int64_t k = begin_tile * kLanes; k < first; k++) scores[k] = lowest;
  for (int64_t k = limit; k < end_tile * kLanes; k++) scores[k] = lowest;
  F most = splat(lowest);
  for (int64_t k = begin_tile * kLanes; k < end_tile * kLanes; k += kLanes) {
    const F v = load(scores + k);
    most = v > most ? v : most;
  }
  const float largest = largest_lane(most);
  F totals = {};
  for (int64_t k = begin_tile * kLanes; k < end_tile * kLanes; k += kLanes) {
    const F p = exponential(load(scores + k) - largest);
    totals = totals + p;
    store(scores + k, p);
  }
  float lanes[kLanes];
  store(lanes, totals);
  const float factor = 1.0f / add_lanes(lanes);
  for (int64_t k = begin_tile * kLanes; k < end_tile * kLanes; k++) scores[k] = scores[k] * factor;
}

template <int M>
void attend_rows(const HeadAttention& h, int64_t row) {
  constexpr int kAtOnce = M <= kQueries ? kQueries / M : 1;
  const int64_t end = h.past + row + M;
  const int64_t first = h.window > 0 && end - M + 1 > h.window ? end - M + 1 - h.window : 0;
  const int64_t begin_tile = first / kLanes, end_tile = (end + kLanes - 1) / kLanes;
  const int64_t stride = end_tile * kLanes;
  const float* queries = h.queries + row * h.head_dim;
  float* y = h.y + row * h.stride;
  all_key_products<M, kAtOnce>(h, queries, begin_tile, end_tile, h.scratch, stride);
  for (int r = 0; r < M; r++) {
    const int64_t limit = end - M + 1 + r;
    const int64_t start = h.window > 0 && limit > h.window ? limit - h.window : 0;
    soften(h.scratch + r * stride, begin_tile, end_tile, start, limit);
  }
  all_value_sums<M, kAtOnce>(h, h.scratch, stride, first, end, 0, y);
}

template <int M>
void attend_from(const HeadAttention& h, int64_t row) {
  for (; row + M <= h.rows; row += M) attend_rows<M>(h, row);
  if constexpr (M > 1) attend_from<M / 2>(h, row);
}

void attend(const HeadAttention& h) { attend_from<kQueries>(h, 0); }
