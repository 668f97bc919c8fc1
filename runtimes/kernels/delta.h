// Gated delta nets (arXiv 2412.06464): a layer keeps a state of fixed size.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "ring.h"

namespace edgespec {

// A pass has rows of one or several sequences, one sequence after the other. Each sequence has a slot. Its state has
// read the tokens up to some token, and a log has the updates of the rows since. The next pass makes the updates of
// those rows that the sequence still has, by the operations of the pass that logged them. So a roll-back undoes
// nothing, and a row's bits do not depend on how rows were divided into passes. The inputs of the convolution lie in
// a ring, where token t has the row t modulo the ring's length.
class Delta {
 public:
  static constexpr const char* kName = "Delta";
  static constexpr ort::Inputs kInputs{{
      {"packed", ort::kFloat}, {"state", ort::kFloat}, {"log", ort::kFloat}, {"ring", ort::kFloat},
      {"sequences", ort::kInt64}, {"places", ort::kInt64}, {"weights", ort::kFloat}, {"a", ort::kFloat},
      {"bias", ort::kFloat}, {"gain", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};

  Delta(const Info& info, const Host& host)
      : kernels_(host.kernels),
        key_heads_(info.number("key_heads")),
        value_heads_(info.number("value_heads")),
        key_width_(info.number("key_width")),
        value_width_(info.number("value_width")),
        tiled_(info.number("tiled") != 0),
        epsilon_(info.real("epsilon")) {
    const bool sound = key_heads_ > 0 && value_heads_ > 0 && value_heads_ < kMost && value_heads_ % key_heads_ == 0;
    require(sound, "value heads of a delta net are no multiple of its key heads");
    for (const int64_t width : {key_width_, value_width_})
      require(width > 0 && width <= kWidestHead && width % kLanes == 0, "a head of a delta net has an impossible width");
    require(value_heads_ * value_width_ < kMost && key_heads_ * key_width_ < kMost, "a delta net is too wide");
    group_ = value_heads_ / key_heads_;
    keys_ = key_heads_ * key_width_;
    values_ = value_heads_ * value_width_;
    // Kernels normalize by the mean of squares, delta nets by their sum.
    const auto width = static_cast<float>(key_width_);
    query_gain_.assign(static_cast<size_t>(key_width_), 1.0f / width);
    key_gain_.assign(static_cast<size_t>(key_width_), 1.0f / std::sqrt(width));
    square_ = 1e-6f / width;
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kInputs["packed"]);
    const int64_t channels = 2 * keys_ + values_, width = channels + values_ + 2 * value_heads_;
    require(packed.shape.size() == 3 && packed.last() == width,
            "a delta net's input is not float32 (1, rows, queries, keys, values, gates, decays and strengths)");
    Layer layer{};
    layer.packed = packed.floats();
    layer.width = width;
    layer.channels = channels;
    const Tensor weights = pass.input(kInputs["weights"]);
    require(weights.shape.size() == 2 && weights.last() == channels && weights.shape[0] > 0 &&
                weights.shape[0] <= kMostTaps,
            "a convolution's weights are not float32 (taps, channels)");
    layer.taps = weights.shape[0];
    layer.weights = weights.floats();
    layer.a = pass.vector(kInputs["a"], value_heads_, "a delta net has another number of decays than heads");
    layer.bias = pass.vector(kInputs["bias"], value_heads_, "a delta net has another number of decays than heads");
    layer.gain = pass.vector(kInputs["gain"], value_width_, "a gain is not as wide as a head");
    const Tensor state = pass.input(kInputs["state"]);
    const int64_t slots = state.shape.empty() ? 0 : state.shape[0];
    layer.state = kept_as(pass, kInputs["state"], {slots, value_heads_, value_width_ / kLanes, key_width_, kLanes});
    layer.log = kept_as(pass, kInputs["log"], {slots, kLogged, keys_ + values_ + value_heads_});
    layer.ring = kept_as(pass, kInputs["ring"], {slots, kLogged + layer.taps - 1, channels});
    const std::vector<Rows> sequences = sequences_of(pass.input(kInputs["sequences"]), packed.size() / width);
    const std::vector<Place> places = places_of(pass.input(kInputs["places"]), sequences, slots);
    layer.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], values_});
    pass.spread(static_cast<int64_t>(sequences.size()) * key_heads_, [&](int64_t i) {
      const auto sequence = static_cast<size_t>(i / key_heads_);
      if (sequences[sequence].count > 0) Work(*this, layer, sequences[sequence], places[sequence], i % key_heads_).run();
    });
  }

 private:
  struct Layer {
    const float* packed;  // (rows, width)
    int64_t width, channels, taps;
    const float *weights, *a, *bias, *gain;
    float *state, *log, *ring;
    float* y;  // (rows, values)
  };

  // Runs rows of a sequence through a key head and the value heads that share it. No other thread touches their part
  // of the state, the log and the ring.
  class Work {
   public:
    Work(const Delta& delta, const Layer& layer, const Rows& rows, const Place& place, int64_t head)
        : d_(delta),
          l_(layer),
          rows_(rows),
          place_(place),
          head_(head),
          ring_{delta.kernels_,
                layer.ring + place.slot * (kLogged + layer.taps - 1) * layer.channels,
                layer.packed + rows.first * layer.width,
                layer.width,
                layer.channels,
                layer.taps,
                rows.past,
                layer.weights,
                nullptr},
          log_(layer.log + place.slot * kLogged * log_width()),
          queries_(kLogged * d_.key_width_),
          keys_(kLogged * d_.key_width_),
          deltas_(d_.group_ * kLogged * d_.value_width_),
          copy_(kStateTiles * d_.key_width_ * kLanes),
          heads_(6 * d_.group_ * kLogged) {}

    void run() {
      const int64_t end = rows_.past + rows_.count, last = std::max(rows_.past, end - kLogged);
      if (rows_.past == 0)
        for (int64_t g = 0; g < d_.group_; g++) std::fill_n(state(g), d_.value_width_ * d_.key_width_, 0.0f);
      int64_t behind = place_.behind;
      for (int64_t from = rows_.past; from < end;) {
        const int64_t to = from < last ? std::min(from + kLogged, last) : end;
        prepare(from, to - from);
        for (int64_t g = 0; g < d_.group_; g++) recur(g, behind, from, to - from, from == last);
        behind = from = to;
      }
      for (int64_t token = last; token < end; token++) log(token, token - last);
      for (int64_t i = 0; i < d_.group_ + 2; i++) ring_.keep(end, channel(i), wide(i));
    }

   private:
    int64_t log_width() const { return d_.keys_ + d_.values_ + d_.value_heads_; }
    int64_t value_head(int64_t g) const { return d_.tiled_ ? head_ + g * d_.key_heads_ : head_ * d_.group_ + g; }

    // The first of the channels that this head convolves: of queries, of keys, and of the values of each value head.
    int64_t channel(int64_t i) const {
      return i < 2 ? i * d_.keys_ + head_ * d_.key_width_ : 2 * d_.keys_ + value_head(i - 2) * d_.value_width_;
    }
    int64_t wide(int64_t i) const { return i < 2 ? d_.key_width_ : d_.value_width_; }

    float* state(int64_t g) const {
      return l_.state + (place_.slot * d_.value_heads_ + value_head(g)) * d_.value_width_ * d_.key_width_;
    }
    const float* input(int64_t token) const { return ring_.input(token); }
    float* logged(int64_t token) const { return log_ + token % kLogged * log_width(); }

    // Computes queries, keys, values, decays and strengths of `count` tokens, the first of which is `from`.
    void prepare(int64_t from, int64_t count) {
      const Kernels& kernels = d_.kernels_;
      for (int64_t row = 0; row < count; row++) {
        float *query = queries_.get() + row * d_.key_width_, *key = keys_.get() + row * d_.key_width_;
        convolve(from + row, 0, query);
        convolve(from + row, 1, key);
        kernels.normalize(query, d_.query_gain_.data(), d_.square_, d_.key_width_, query);
        kernels.normalize(key, d_.key_gain_.data(), d_.square_, d_.key_width_, key);
        for (int64_t g = 0; g < d_.group_; g++) {
          convolve(from + row, 2 + g, deltas(g) + row * d_.value_width_);
          const float* x = input(from + row) + l_.channels + d_.values_ + value_head(g);
          part(2)[g * kLogged + row] = x[0], part(3)[g * kLogged + row] = l_.bias[value_head(g)];
          part(4)[g * kLogged + row] = l_.a[value_head(g)], part(5)[g * kLogged + row] = x[d_.value_heads_];
        }
      }
      for (int64_t g = 0; g < d_.group_; g++) {
        const int64_t at = g * kLogged;
        kernels.decay(part(2) + at, part(3) + at, part(4) + at, count, part(0) + at, nullptr);
        std::fill_n(part(1) + at, count, 1.0f);
        kernels.multiply(Gate::sigmoid, part(5) + at, count, part(1) + at);
      }
    }

    void convolve(int64_t token, int64_t i, float* y) const { ring_.convolve(token, channel(i), wide(i), y); }

    // Runs `count` rows through the state of a value head, which has read `behind` tokens.
    void recur(int64_t g, int64_t behind, int64_t from, int64_t count, bool last) const {
      const int64_t head = value_head(g);
      std::array<Update, kLogged> updates;
      Recurrence r{};
      r.state = state(g);
      r.copy = last ? copy_.get() : nullptr;
      r.key_width = d_.key_width_;
      r.tiles = d_.value_width_ / kLanes;
      for (int64_t token = behind; token < from && from == rows_.past; token++) {
        const float* row = logged(token);
        updates[static_cast<size_t>(r.update_count++)] = {row + head_ * d_.key_width_,
                                                          row + d_.keys_ + head * d_.value_width_,
                                                          row[d_.keys_ + d_.values_ + head]};
      }
      r.updates = updates.data();
      r.rows = count;
      r.queries = queries_.get();
      r.keys = keys_.get();
      r.decays = part(0) + g * kLogged;
      r.strengths = part(1) + g * kLogged;
      r.deltas = deltas(g);
      r.y = l_.y + (rows_.first + from - rows_.past) * d_.values_ + head * d_.value_width_;
      r.stride = d_.values_;
      d_.kernels_.recur(r);
      for (int64_t row = 0; row < count; row++) {
        float* y = r.y + row * r.stride;
        d_.kernels_.normalize(y, l_.gain, d_.epsilon_, d_.value_width_, y);
        d_.kernels_.multiply(Gate::silu, input(from + row) + l_.channels + head * d_.value_width_, d_.value_width_, y);
      }
    }

    // Writes the update of `token` to the log; its row was computed as number `row` of the last rows.
    void log(int64_t token, int64_t row) const {
      float* to = logged(token);
      std::copy_n(keys_.get() + row * d_.key_width_, d_.key_width_, to + head_ * d_.key_width_);
      for (int64_t g = 0; g < d_.group_; g++) {
        const int64_t head = value_head(g);
        std::copy_n(deltas(g) + row * d_.value_width_, d_.value_width_, to + d_.keys_ + head * d_.value_width_);
        to[d_.keys_ + d_.values_ + head] = part(0)[g * kLogged + row];
      }
    }

    float* deltas(int64_t g) const { return deltas_.get() + g * kLogged * d_.value_width_; }
    // Numbers by head and row: decays, strengths, and their inputs.
    float* part(int64_t i) const { return heads_.get() + i * d_.group_ * kLogged; }

    const Delta& d_;
    const Layer& l_;
    const Rows& rows_;
    const Place& place_;
    int64_t head_;
    Ring ring_;
    float* log_;
    Buffer<float> queries_, keys_, deltas_, copy_, heads_;
  };

  const Kernels& kernels_;
  int64_t key_heads_, value_heads_, key_width_, value_width_;
  bool tiled_;
  float epsilon_, square_ = 0;
  int64_t group_ = 1, keys_ = 0, values_ = 0;
  std::vector<float> query_gain_, key_gain_;
};

}  // namespace edgespec
