// Attention over a KV cache that is written in place.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "sequences.h"

namespace edgespec {

// The cache is float16: attention is bound by the bytes it reads, and sums are float32 all the same. Keys lie in
// tiles of 16 tokens, channel by channel, so that a lane is a token; values lie row by row. A sequence has a table of
// blocks of 32 tokens; others may have some of them too. Eight blocks make an extent, which lies head by head, and those
// that follow each other in the table and in an extent are read as one.
// A pass is of one or several sequences, whose rows follow each other.
// Where the input is so wide, each query has a gate behind it, by whose sigmoid its head's result is multiplied. An
// input of queries and keys has its values in the keys, as they are before their normalization. One of queries alone
// attends to what another layer has written, and the node has no outputs of a cache. A head may have a sink, a score
// beside those of the tokens, whose share goes to nothing. With a `cap`, scores s are cap * tanh(s / cap).
// Of a sequence's first rows, as many as `injected_rows` says, keys and values are injected: they have no queries, and
// are no rows of the result. Where attention is bidirectional, rows also see those of their sequence behind them.
class Attention {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat16, ort::kFloat16, ort::kInt64,
                                         ort::kInt64, ort::kFloat,   ort::kFloat,   ort::kFloat,
                                         ort::kFloat, ort::kFloat,   ort::kFloat,   ort::kInt64};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kRequired, ort::kRequired, ort::kRequired,
                                                  ort::kRequired, ort::kOptional, ort::kOptional, ort::kOptional,
                                                  ort::kOptional, ort::kOptional, ort::kOptional, ort::kOptional};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat16, ort::kFloat16};
  enum Input : size_t {
    kPacked, kPastKey, kPastValue, kSequences, kBlocks, kCos, kSin, kQueryGain, kKeyGain, kSinks, kInjected,
    kInjectedRows
  };

  Attention(const Info& info, const Host& host)
      : kernels_(host.kernels),
        heads_(info.number("heads")),
        kv_heads_(info.number("kv_heads")),
        head_dim_(info.number("head_dim")),
        window_(info.number("window")),
        interleaved_(info.number("interleaved") != 0),
        bidirectional_(info.number("bidirectional", 0) != 0),
        distance_(info.number("pair_distance", 0)),
        step_(info.number("growth_step", 0)),
        growth_(info.real("growth", 0)),
        scale_(info.real("scale")),
        epsilon_(info.real("epsilon")),
        cap_(info.real("cap", 0)) {
    const bool sound = heads_ > 0 && kv_heads_ > 0 && heads_ < kMost && heads_ % kv_heads_ == 0;
    require(sound, "attention heads are no multiple of heads of keys and values");
    require(head_dim_ > 0 && head_dim_ < kMost, "a head has an impossible width");
    if (info.number("normed_values", 0) != 0) units_.assign(static_cast<size_t>(head_dim_), 1.0f);
    require(window_ >= 0, "an attention window is negative");
    require(distance_ >= 0 && distance_ <= head_dim_ / 2, "pairs that turn lie farther apart than half a head");
    require(step_ >= 0, "queries grow after a negative number of tokens");
    require(cap_ >= 0.0f && cap_ < __builtin_inff(), "attention's scores end at an impossible number");
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kPacked);
    const int64_t width = packed.last(), queries = heads_ * head_dim_, keys = kv_heads_ * head_dim_;
    State s{};
    s.gated = width == 2 * (queries + keys);
    s.shared = width == queries;
    s.value_step = width == queries + keys ? 0 : keys;
    const bool fits = s.gated || s.shared || width == queries + keys || width == queries + 2 * keys;
    require(packed.type == ort::kFloat && packed.shape.size() == 3 && fits,
            "attention's input is not float32 (1, rows, heads and twice the heads of keys)");
    s.packed = packed.floats();
    s.width = width;
    s.query_step = (s.gated ? 2 : 1) * head_dim_;
    const Tensor injected = pass.input(kInjected);
    const int64_t injected_rows = injected ? injected.size() / (2 * keys) : 0;
    std::vector<Rows> sequences = sequences_of(pass.input(kSequences), injected_rows + packed.size() / width);
    cache(pass, s);
    give_blocks(sequences, pass.input(kBlocks), s.extents * (kExtent / kTokens), !s.shared);
    rotation(pass, s, sequences);
    s.query_gain = pass.vector(kQueryGain, head_dim_, "a gain is not as wide as a head");
    s.key_gain = pass.vector(kKeyGain, head_dim_, "a gain is not as wide as a head");
    s.sinks = pass.vector(kSinks, heads_, "attention has another number of sinks than heads");
    if (injected) inject(pass, s, injected, injected_rows, sequences);
    s.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], heads_ * head_dim_});
    const auto count = static_cast<int64_t>(sequences.size());
    const auto append_one = [&](int64_t i) {
      append(s, sequences[i / kv_heads_], i % kv_heads_, s.packed + heads_ * s.query_step, width, s.value_step);
    };
    const int64_t appended = s.shared || packed.size() == 0 ? 0 : count * kv_heads_;
    if (packed.size() <= kFewRows * width)
      for (int64_t i = 0; i < appended; i++) append_one(i);
    else
      pass.spread(appended, append_one);
    const std::vector<Share> shares = shares_of(sequences, pass.threads());
    pass.spread(static_cast<int64_t>(shares.size()) * kv_heads_,
                [&](int64_t i) { attend(s, shares[static_cast<size_t>(i / kv_heads_)], i % kv_heads_); });
  }

 private:
  static constexpr int64_t kFewRows = 8, kMostQueries = 48;

  struct State {
    const float* packed;
    int64_t width, query_step, value_step, extents, pairs;  // pairs: of a head's channels, that turn
    bool gated, shared;
    const float *cos, *sin, *query_gain, *key_gain, *sinks;
    Half *keys, *values;
    float* y;
  };

  // Keeps the keys and values of each sequence's first rows, and leaves the others.
  void inject(const Pass& pass, const State& s, const Tensor& injected, int64_t total,
              std::vector<Rows>& sequences) const {
    const Tensor numbers = pass.input(kInjectedRows);
    const int64_t keys = kv_heads_ * head_dim_;
    require(injected.type == ort::kFloat && injected.shape.size() == 3 && injected.last() == 2 * keys && !s.shared,
            "injected keys and values are not float32 (1, rows, twice the heads of keys)");
    require(numbers && numbers.type == ort::kInt64 && numbers.size() == static_cast<int64_t>(sequences.size()),
            "the counts of injected rows are no int64 (sequences)");
    const auto* counts = static_cast<const int64_t*>(numbers.data);
    std::vector<Rows> kept;
    int64_t before = 0;
    for (Rows& rows : sequences) {
      const int64_t count = *counts++;
      require(count >= 0 && count <= rows.count && count <= total - before,
              "a sequence has more injected rows than there are");
      kept.push_back(rows);
      kept.back().count = count;
      kept.back().first = before;
      rows.first -= before;
      rows.past += count;
      rows.count -= count;
      before += count;
    }
    require(before == total, "there are more injected rows than the sequences have");
    pass.spread(static_cast<int64_t>(kept.size()) * kv_heads_, [&](int64_t i) {
      append(s, kept[static_cast<size_t>(i / kv_heads_)], i % kv_heads_, injected.floats(), 2 * keys, keys);
    });
  }

  // Queries of a sequence that share a head of keys: head `i % group` of row `i / group`, for i from `first` to `last`.
  struct Share {
    const Rows* rows;
    int64_t first, last;
  };

  // Few shares of each sequence, since each reads the cache of its head of keys; but as many as let all threads work
  // to the end.
  std::vector<Share> shares_of(const std::vector<Rows>& sequences, int64_t threads) const {
    const int64_t group = heads_ / kv_heads_;
    const auto cut = [&](int64_t most) {
      std::vector<Share> shares;
      for (const Rows& rows : sequences) {
        const int64_t queries = rows.count * group, count = (queries + most - 1) / most;
        for (int64_t i = 0; i < count; i++)
          shares.push_back({&rows, queries * i / count, queries * (i + 1) / count});
      }
      return shares;
    };
    std::vector<Share> shares = cut(kMostQueries);
    const auto pieces = static_cast<int64_t>(shares.size()) * kv_heads_;
    if (pieces == 0 || pieces >= 4 * threads || pieces % threads == 0) return shares;
    const int64_t times = threads / std::gcd(pieces, threads);
    int64_t longest = 0;
    for (const Share& share : shares) longest = std::max(longest, share.last - share.first);
    return cut((longest + times - 1) / times);
  }

  // The cache, in place where the pass binds one buffer for what was and what is.
  void cache(const Pass& pass, State& s) const {
    Half** const present[] = {&s.keys, &s.values};
    for (size_t i = 0; i < 2; i++) {
      const Tensor past = pass.input(kPastKey + i);
      const bool shaped = past.type == ort::kFloat16 && past.shape.size() == 4 && past.shape[1] == kv_heads_ &&
                          past.shape[2] == kExtent && past.shape[3] == head_dim_;
      require(shaped, "a KV cache is not float16 (extents, heads, 256, head width)");
      require(i == 0 || past.shape[0] == s.extents, "keys and values have caches of different length");
      s.extents = past.shape[0];
      *present[i] = s.shared ? static_cast<Half*>(past.data) : kept<Half>(pass, 1 + i, past);
    }
  }

  void rotation(const Pass& pass, State& s, const std::vector<Rows>& sequences) const {
    const Tensor cos = pass.input(kCos), sin = pass.input(kSin);
    if (!cos && !sin) return;
    const bool shaped = cos && sin && cos.type == ort::kFloat && sin.type == ort::kFloat &&
                        cos.shape.size() == 2 && cos.shape == sin.shape &&
                        cos.last() <= (distance_ > 0 ? distance_ : head_dim_ / 2);
    require(shaped, "rotary tables are not float32 (positions, half the rotated channels)");
    for (const Rows& each : sequences)
      require(each.past + each.count <= cos.shape[0], "a pass goes beyond the rotary tables");
    s.cos = cos.floats();
    s.sin = sin.floats();
    s.pairs = cos.last();
  }

  // A head's channels of the token at `position`: normalized, rotated, times `factor`.
  void prepare(const State& s, const float* x, const float* gain, int64_t position, float factor, float* y) const {
    if (gain != nullptr)
      kernels_.normalize(x, gain, epsilon_, head_dim_, y);
    else
      std::copy(x, x + head_dim_, y);
    const int64_t apart = distance_ > 0 ? distance_ : s.pairs;
    const float *cos = s.cos + position * s.pairs, *sin = s.sin + position * s.pairs;
    for (int64_t i = 0; i < s.pairs; i++) {
      const int64_t a = interleaved_ ? 2 * i : i, b = interleaved_ ? 2 * i + 1 : apart + i;
      const float first = y[a], second = y[b];
      y[a] = first * cos[i] - second * sin[i];
      y[b] = second * cos[i] + first * sin[i];
    }
    if (factor != 1.0f)
      for (int64_t i = 0; i < head_dim_; i++) y[i] = y[i] * factor;
  }

  // Queries grow with their position: by the logarithm of the whole steps that lie before it.
  float scale_at(int64_t position) const {
    if (step_ == 0 || position < step_) return scale_;
    return scale_ * static_cast<float>(1.0 + growth_ * std::log1p(static_cast<double>(position / step_)));
  }

  // Appends a head's keys, which lie `width` numbers apart from `from` on, and its values, `value_step` behind these.
  void append(const State& s, const Rows& rows, int64_t head, const float* from, int64_t width,
              int64_t value_step) const {
    const Buffer<float> key(head_dim_);
    const BlockTable table = {rows.blocks, kv_heads_, head_dim_};
    for (int64_t row = 0; row < rows.count; row++) {
      const float* x = from + (rows.first + row) * width + head * head_dim_;
      const int64_t token = rows.past + row, lane = token % kLanes, first = head * kExtent * head_dim_;
      prepare(s, x, s.key_gain, token, 1.0f, key.get());
      Half* keys = s.keys + first + table.of(token - lane) + lane;
      for (int64_t d = 0; d < head_dim_; d++) keys[d * kLanes] = narrow(key.get()[d]);
      const float* value = x + value_step;
      if (!units_.empty()) {
        kernels_.normalize(value, units_.data(), epsilon_, head_dim_, key.get());
        value = key.get();
      }
      std::transform(value, value + head_dim_, s.values + first + table.of(token), narrow);
    }
  }

  void attend(const State& s, const Share& share, int64_t kv_head) const {
    const Rows& rows = *share.rows;
    const int64_t group = heads_ / kv_heads_, count = share.last - share.first;
    const auto row_of = [&](int64_t i) { return (share.first + i) / group; };
    const auto head_of = [&](int64_t i) { return kv_head * group + (share.first + i) % group; };
    const auto query = [&](int64_t i) {
      return s.packed + (rows.first + row_of(i)) * s.width + head_of(i) * s.query_step;
    };
    const Buffer<Span> spans(count);
    const Buffer<float> vectors(count * head_dim_), sinks(count);
    for (int64_t i = 0; i < count; i++) {
      const int64_t position = rows.past + row_of(i), end = position + 1;
      const int64_t limit = bidirectional_ ? rows.past + rows.count : end;
      spans.get()[i] = {window_ > 0 && end > window_ ? end - window_ : 0, limit};
      prepare(s, query(i), s.query_gain, position, scale_at(position), vectors.get() + i * head_dim_);
      if (s.sinks != nullptr) sinks.get()[i] = s.sinks[head_of(i)];
    }
    Queries q{};
    q.spans = spans.get();
    q.count = count;
    q.sinks = s.sinks == nullptr ? nullptr : sinks.get();
    q.vectors = vectors.get();
    q.table = {rows.blocks, kv_heads_, head_dim_};
    q.keys = s.keys + kv_head * kExtent * head_dim_;
    q.values = s.values + kv_head * kExtent * head_dim_;
    q.head_dim = head_dim_;
    q.begin = spans.get()[0].first / kLanes * kLanes;
    q.end = spans.get()[count - 1].limit;
    q.stride = score_stride(q.end - q.begin);
    const Buffer<float> scores(count * q.stride);
    q.scores = scores.get();
    q.cap = cap_;
    kernels_.attend(q);
    for (int64_t i = 0; i < count; i++) {
      const float* x = vectors.get() + i * head_dim_;
      float* y = s.y + ((rows.first + row_of(i)) * heads_ + head_of(i)) * head_dim_;
      std::copy(x, x + head_dim_, y);
      if (s.gated) kernels_.multiply(Gate::sigmoid, query(i) + head_dim_, head_dim_, y);
    }
  }

  const Kernels& kernels_;
  int64_t heads_, kv_heads_, head_dim_, window_;
  bool interleaved_, bidirectional_;
  int64_t distance_, step_;  // distance_: of the two of a pair; 0 where their number says it
  float growth_, scale_, epsilon_, cap_;
  std::vector<float> units_;  // the gain of values; empty where these are not normalized
};

}  // namespace edgespec
