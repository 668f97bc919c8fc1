// Attention of rows that all see each other. Part of generic.inl.
//
// A group of queries goes through one stretch of keys and values after the other (Milakov and Gimelshein 2018, arXiv
// 1805.02867; Dao et al. 2022, arXiv 2205.14135), so that its scores stay in the nearest cache.

constexpr int64_t kStretch = 512;

// Adds the products of M rows of bytes with 16 lanes.
template <int M>
inline void byte_products(const uint8_t* lines, int64_t groups, const uint8_t* rows, int64_t stride, I* sums) {
  for (int64_t g = 0; g < groups; g++) {
    const B codes = load_line(lines + g * kLine);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      int32_t four;
      __builtin_memcpy(&four, rows + m * stride + 4 * g, sizeof four);
      sums[m] = add_bytes(sums[m], codes, four);
    }
  }
}

// Makes shares of a row's scores, e to the power of each less the largest so far, rounds 32 with a scale, and returns
// the factor of earlier sums.
inline float share_out(float* scores, int64_t count, float* most, float* total, uint8_t* codes, float* scales) {
  typedef uint8_t Codes __attribute__((vector_size(kLanes)));
  const int64_t end = (count + kTokens - 1) / kTokens * kTokens;
  for (int64_t k = count; k < end; k++) scores[k] = -__builtin_inff();
  F top = splat(*most), sums = {};
  for (int64_t k = 0; k < end; k += kLanes) {
    const F v = load(scores + k);
    top = v > top ? v : top;
  }
  const float largest = largest_lane(top);
  const F magic = splat(12582912.0f);  // adding it rounds to a whole number
  for (int64_t k = 0; k < end; k += kTokens) {
    const F shares[] = {exponential(load(scores + k) - largest), exponential(load(scores + k + kLanes) - largest)};
    const float size = largest_lane(shares[0] > shares[1] ? shares[0] : shares[1]);
    const float per_unit = size > 1e-30f ? 127.0f / size : 0.0f;
    for (int i = 0; i < 2; i++) {
      sums = sums + shares[i];
      const I whole = __builtin_convertvector(fma(shares[i], splat(per_unit), magic) - magic, I);
      const Codes small = __builtin_convertvector(whole, Codes);
      __builtin_memcpy(codes + k + i * kLanes, &small, sizeof small);
    }
    scales[k / kTokens] = size / 127.0f;
  }
  float lanes[kLanes], before[kLanes];
  store(lanes, sums);
  store(before, exponential(splat(*most - largest)));
  *total = *total * before[0] + add_lanes(lanes);
  *most = largest;
  return before[0];
}

// M queries, from number `first` on.
template <int M>
void attend_group(const FullQueries& q, int64_t first) {
  alignas(64) float scores[M][kStretch], scales[M][kStretch / kTokens];
  alignas(64) uint8_t codes[M][kStretch];
  float most[M], before[M];
  float* totals = q.totals + first;
  const int64_t width = q.tiles * kLanes;
  for (int m = 0; m < M; m++) most[m] = -__builtin_inff(), totals[m] = 0.0f;
  for (int64_t from = 0; from < q.rows; from += kStretch) {
    const int64_t count = q.rows - from < kStretch ? q.rows - from : kStretch;
    const uint8_t* key = q.keys + from / kLanes * full_key_bytes(q.groups);
    for (int64_t k = 0; k < count; k += kLanes, key += full_key_bytes(q.groups)) {
      const uint8_t* end = key + q.groups * kLine;
      I sums[M];
      for (int m = 0; m < M; m++) __builtin_memcpy(&sums[m], end, sizeof sums[m]);
      byte_products<M>(key, q.groups, q.codes + first * q.groups * 4, q.groups * 4, sums);
      F own;
      __builtin_memcpy(&own, end + kLine, sizeof own);
      for (int m = 0; m < M; m++) store(scores[m] + k, real(sums[m]) * splat(q.scales[first + m]) * own);
    }
    for (int m = 0; m < M; m++) before[m] = share_out(scores[m], count, most + m, totals + m, codes[m], scales[m]);
    const int64_t blocks = (count + kTokens - 1) / kTokens;
    for (int64_t t = 0; t < q.tiles; t++) {
      float* y = q.sums + first * width + t * kLanes;
      F totals_of[M];
      for (int m = 0; m < M; m++) totals_of[m] = from == 0 ? F{} : load(y + m * width) * before[m];
      const uint8_t* value = q.values + (from / kTokens * q.tiles + t) * kTokens * kLanes;
      for (int64_t b = 0; b < blocks; b++, value += q.tiles * kTokens * kLanes) {
        I sums[M] = {};
        byte_products<M>(value, kGroups, codes[0] + b * kTokens, kStretch, sums);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) totals_of[m] = fma(real(sums[m]), splat(scales[m][b]), totals_of[m]);
      }
      for (int m = 0; m < M; m++) store(y + m * width, totals_of[m]);
    }
  }
}

void attend_all(const FullQueries& q) {
  const int64_t groups = (q.count + kQueries - 1) / kQueries;
  for (int64_t i = 0; i < groups; i++) {
    const int64_t first = q.count * i / groups;
    with_count(q.count * (i + 1) / groups - first, [&]<int M>() { attend_group<M>(q, first); });
  }
}
