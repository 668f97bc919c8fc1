// Delta nets: a convolution over rows, decays, and a state that each row changes. Part of generic.inl.
//
// A lane is a channel, a head or a value, so that no sum runs across lanes but that of a key with its query.

constexpr int kTilesAtOnce = kSums / 6;
static_assert(kTilesAtOnce >= 1 && kTilesAtOnce <= kStateTiles);

void convolve(const float* const* rows, int64_t taps, const float* weights, int64_t stride, int64_t count, float* y) {
  for (int64_t c = 0; c < count; c += kLanes) {
    F sum = load(rows[0] + c) * load(weights + c);
    for (int64_t t = 1; t < taps; t++) sum = fma(load(rows[t] + c), load(weights + t * stride + c), sum);
    store(y + c, sum);
  }
}

// 16 of `count` numbers, or all of fewer.
inline F load_some(const float* x, int64_t count) {
  if (count >= kLanes) return load(x);
  F v = {};
  __builtin_memcpy(&v, x, sizeof(float) * static_cast<size_t>(count));
  return v;
}

inline void store_some(float* y, int64_t count, F v) {
  if (count >= kLanes) return store(y, v);
  __builtin_memcpy(y, &v, sizeof(float) * static_cast<size_t>(count));
}

// log(1 + y) for y from 0 to 1: 2 artanh(s) with s = y / (2 + y), whose powers' sum ends where floats do.
inline F log_above_one(F y) {
  const F s = y / (y + 2.0f), square = s * s;
  F sum = splat(1.0f / 15);
  for (int n = 13; n > 0; n -= 2) sum = fma(sum, square, splat(1.0f / static_cast<float>(n)));
  return (s + s) * sum;
}

void decay(const float* x, const float* bias, const float* a, int64_t count, float* y, float* softs) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const F v = load_some(x + i, count - i) + load_some(bias + i, count - i);
    const F positive = v < 0.0f ? F{} : v;  // not a number stays so
    const F soft = positive + log_above_one(exponential(-magnitudes(v)));
    store_some(y + i, count - i, exponential(load_some(a + i, count - i) * soft));
    if (softs != nullptr) store_some(softs + i, count - i, soft);
  }
}

void multiply(Gate gate, const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_some(y + i, count - i, load_some(y + i, count - i) * activate(load_some(x + i, count - i), gate));
}

void cap(const float* x, int64_t count, float most, float* y) {
  for (int64_t i = 0; i < count; i += kLanes)
    store_some(y + i, count - i, capped(load_some(x + i, count - i), most));
}

// A row's key and query against T tiles of the state, in one go with the change that a row before made.
template <int T>
struct Dots {
  F with_key[T], with_query[T];
};

template <int T, bool Changed, bool Read>
inline void sweep(const float* from, float* to, int64_t keys, const Update& change, const float* key,
                  const float* query, Dots<T>& dots) {
  F deltas[T], by_key[T] = {}, by_query[T] = {};
  F decay = {};
  if constexpr (Changed) {
    decay = splat(change.decay);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) deltas[t] = load(change.delta + t * kLanes);
  }
  for (int64_t i = 0; i < keys; i++) {
    F s[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) s[t] = load(from + (t * keys + i) * kLanes);
    if constexpr (Changed) {
      const F k = splat(change.key[i]);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        s[t] = fma(k, deltas[t], s[t] * decay);
        store(to + (t * keys + i) * kLanes, s[t]);
      }
    }
    if constexpr (Read) {
      const F k = splat(key[i]), q = splat(query[i]);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        by_key[t] = fma(k, s[t], by_key[t]);
        by_query[t] = fma(q, s[t], by_query[t]);
      }
    }
  }
  for (int t = 0; Read && t < T; t++) dots.with_key[t] = by_key[t], dots.with_query[t] = by_query[t];
}

inline float dot(const float* a, const float* b, int64_t count) {
  F sums = {};
  for (int64_t i = 0; i < count; i += kLanes) sums = fma(load(a + i), load(b + i), sums);
  float lanes[kLanes];
  store(lanes, sums);
  return add_lanes(lanes);
}

// All rows through tiles `first` to `first + T`. Only the first sweep meets memory.
template <int T>
void recur_tiles(const Recurrence& r, int64_t first) {
  const int64_t place = first * kLanes, width = r.tiles * kLanes;
  float* state = r.state + first * r.key_width * kLanes;
  Dots<T> dots;
  const auto of_tiles = [&](const Update& update) { return Update{update.key, update.delta + place, update.decay}; };
  for (int64_t i = 0; i + 1 < r.update_count; i++)
    sweep<T, true, false>(state, state, r.key_width, of_tiles(r.updates[i]), nullptr, nullptr, dots);
  Update change = {};
  const float* from = state;
  for (int64_t row = 0; row < r.rows; row++) {
    const float *key = r.keys + row * r.key_width, *query = r.queries + row * r.key_width;
    float* to = row > 0 && r.copy != nullptr ? r.copy : state;
    if (row == 0 && r.update_count == 0) {
      sweep<T, false, true>(from, to, r.key_width, change, key, query, dots);
    } else {
      if (row == 0) change = of_tiles(r.updates[r.update_count - 1]);
      sweep<T, true, true>(from, to, r.key_width, change, key, query, dots);
    }
    from = to;
    const F decay = splat(r.decays[row]), strength = splat(r.strengths[row]), both = splat(dot(key, query, r.key_width));
    float *deltas = r.deltas + row * width + place, *y = r.y + row * r.stride + place;
    for (int t = 0; t < T; t++) {
      const F value = load(deltas + t * kLanes);
      const F delta = strength * (r.sums ? value : value - dots.with_key[t] * decay);
      const F result = fma(both, delta, dots.with_query[t] * decay);
      store(deltas + t * kLanes, delta);
      store(y + t * kLanes, r.sums ? fma(splat(r.skip), value, result) : result);
    }
    change = {key, deltas, r.decays[row]};
  }
  if (r.copy == nullptr) sweep<T, true, false>(state, state, r.key_width, change, nullptr, nullptr, dots);
}

void recur(const Recurrence& r) {
  int64_t first = 0;
  for (; first + kTilesAtOnce <= r.tiles; first += kTilesAtOnce) recur_tiles<kTilesAtOnce>(r, first);
  for (; first < r.tiles; first++) recur_tiles<1>(r, first);
}
