// Layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a layer keeps a state of fixed size.
#pragma once

#include <array>
#include <vector>

#include "ring.h"

namespace edgespec {

// States, logs and rings are kept as for delta nets. A row has gates, then the inputs of the convolution, which are
// values, keys (B) and queries (C), then steps. Heads share keys and queries in groups.
class Mamba {
 public:
  static constexpr const char* kName = "Mamba";
  static constexpr ort::Inputs kInputs{{
      {"packed", ort::kFloat}, {"state", ort::kFloat}, {"log", ort::kFloat}, {"ring", ort::kFloat},
      {"sequences", ort::kInt64}, {"places", ort::kInt64}, {"weights", ort::kFloat}, {"conv_bias", ort::kFloat},
      {"a", ort::kFloat}, {"bias", ort::kFloat}, {"skip", ort::kFloat}, {"gain", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};

  Mamba(const Info& info, const Host& host)
      : kernels_(host.kernels),
        heads_(info.number("heads")),
        width_(info.number("width")),
        groups_(info.number("groups")),
        key_width_(info.number("key_width")),
        epsilon_(info.real("epsilon")) {
    const bool sound = groups_ > 0 && heads_ > 0 && heads_ < kMost && heads_ % groups_ == 0;
    require(sound, "heads of Mamba-2 are no multiple of its groups");
    for (const int64_t width : {width_, key_width_})
      require(width > 0 && width <= kWidestHead && width % kLanes == 0, "a head of Mamba-2 has an impossible width");
    require(heads_ * width_ < kMost && groups_ * key_width_ < kMost, "a layer of Mamba-2 is too wide");
    values_ = heads_ * width_;
    keys_ = groups_ * key_width_;
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kInputs["packed"]), weights = pass.input(kInputs["weights"]);
    const int64_t channels = values_ + 2 * keys_, width = values_ + channels + heads_;
    require(packed.shape.size() == 3 && packed.last() == width,
            "the input of Mamba-2 is not float32 (1, rows, gates, values, keys, queries and steps)");
    require(weights.shape.size() == 2 && weights.last() == channels && weights.shape[0] > 0 &&
                weights.shape[0] <= kMostTaps,
            "a convolution's weights are not float32 (taps, channels)");
    Layer l{};
    l.packed = packed.floats(), l.width = width, l.channels = channels;
    l.taps = weights.shape[0], l.weights = weights.floats();
    l.rows = packed.size() / width;
    l.conv_bias = pass.vector(kInputs["conv_bias"], channels, "a convolution has another number of biases");
    l.a = pass.vector(kInputs["a"], heads_, "Mamba-2 has another number of decays than heads");
    l.bias = pass.vector(kInputs["bias"], heads_, "Mamba-2 has another number of biases than heads");
    l.skip = pass.vector(kInputs["skip"], heads_, "Mamba-2 has another number of factors than heads");
    l.gain = pass.vector(kInputs["gain"], values_, "a gain is not as wide as all heads");
    const Tensor state = pass.input(kInputs["state"]);
    const int64_t slots = state.shape.empty() ? 0 : state.shape[0];
    l.state = kept_as(pass, kInputs["state"], {slots, heads_, width_ / kLanes, key_width_, kLanes});
    l.log = kept_as(pass, kInputs["log"], {slots, kLogged, keys_ + values_ + heads_});
    l.ring = kept_as(pass, kInputs["ring"], {slots, kLogged + l.taps - 1, channels});
    const std::vector<Rows> sequences = sequences_of(pass.input(kInputs["sequences"]), l.rows);
    const std::vector<Place> places = places_of(pass.input(kInputs["places"]), sequences, slots);
    l.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], values_});
    const Buffer<float> shared(2 * l.rows * keys_);
    l.keys = shared.get(), l.queries = shared.get() + l.rows * keys_;
    const auto count = static_cast<int64_t>(sequences.size());
    const auto each = [&](int64_t parts, const auto& work) {
      pass.spread(count * parts, [&](int64_t i) {
        const auto at = static_cast<size_t>(i / parts);
        if (sequences[at].count > 0) work(sequences[at], places[at], i % parts);
      });
    };
    each(groups_, [&](const Rows& rows, const Place& place, int64_t g) { prepare(l, rows, place, g); });
    each(heads_, [&](const Rows& rows, const Place& place, int64_t head) { recur(l, rows, place, head); });
    // What heads share is written behind all that read it.
    each(groups_, [&](const Rows& rows, const Place& place, int64_t g) { keep(l, rows, place, g); });
    pass.spread(l.rows * groups_, [&](int64_t i) {
      const int64_t wide = values_ / groups_, first = i % groups_ * wide;
      float* y = l.y + i / groups_ * values_ + first;
      kernels_.normalize(y, l.gain + first, epsilon_, wide, y);
    });
  }

 private:
  struct Layer {
    const float* packed;  // (rows, width)
    int64_t width, channels, taps, rows;
    const float *weights, *conv_bias, *a, *bias, *skip, *gain;
    float *state, *log, *ring;
    float *keys, *queries;  // (groups, rows, key_width), convolved
    float* y;               // (rows, values)
  };

  Ring ring(const Layer& l, const Rows& rows, const Place& place) const {
    float* own = l.ring + place.slot * (kLogged + l.taps - 1) * l.channels;
    const float* inputs = l.packed + rows.first * l.width + values_;
    return {kernels_, own, inputs, l.width, l.channels, l.taps, rows.past, l.weights, l.conv_bias};
  }
  int64_t logged_width() const { return keys_ + values_ + heads_; }
  float* logged(const Layer& l, const Place& place, int64_t token) const {
    return l.log + (place.slot * kLogged + token % kLogged) * logged_width();
  }
  int64_t shared(const Layer& l, const Rows& rows, int64_t g) const { return (g * l.rows + rows.first) * key_width_; }

  void prepare(const Layer& l, const Rows& rows, const Place& place, int64_t g) const {
    const Ring inputs = ring(l, rows, place);
    for (int64_t row = 0; row < rows.count; row++) {
      const int64_t at = shared(l, rows, g) + row * key_width_, channel = values_ + g * key_width_;
      inputs.convolve(rows.past + row, channel, key_width_, l.keys + at);
      inputs.convolve(rows.past + row, channel + keys_, key_width_, l.queries + at);
    }
  }

  // Takes the rows of a sequence through the state of a head.
  void recur(const Layer& l, const Rows& rows, const Place& place, int64_t head) const {
    const Ring inputs = ring(l, rows, place);
    const int64_t end = rows.past + rows.count, last = std::max(rows.past, end - kLogged), g = head / (heads_ / groups_);
    const Buffer<float> deltas(kLogged * width_), copy(kStateTiles * key_width_ * kLanes);
    std::array<float, kLogged> steps, a, bias, decays, strengths;
    a.fill(l.a[head]), bias.fill(l.bias[head]);
    Recurrence r{};
    r.state = l.state + (place.slot * heads_ + head) * width_ * key_width_;
    if (rows.past == 0) std::fill_n(r.state, width_ * key_width_, 0.0f);
    r.key_width = key_width_, r.tiles = width_ / kLanes;
    r.decays = decays.data(), r.strengths = strengths.data(), r.deltas = deltas.get();
    r.stride = values_, r.sums = true, r.skip = l.skip[head];
    std::array<Update, kLogged> updates;
    for (int64_t token = place.behind; token < rows.past; token++) {
      const float* row = logged(l, place, token);
      updates[static_cast<size_t>(r.update_count++)] = {row + g * key_width_, row + keys_ + head * width_,
                                                        row[keys_ + values_ + head]};
    }
    r.updates = updates.data();
    for (int64_t from = rows.past; from < end; from += r.rows, r.update_count = 0) {
      r.rows = (from < last ? std::min(from + kLogged, last) : end) - from;
      r.copy = from == last ? copy.get() : nullptr;
      for (int64_t row = 0; row < r.rows; row++) {
        inputs.convolve(from + row, head * width_, width_, r.deltas + row * width_);
        steps[static_cast<size_t>(row)] = inputs.input(from + row)[l.channels + head];
      }
      kernels_.decay(steps.data(), bias.data(), a.data(), r.rows, decays.data(), strengths.data());
      const int64_t row = from - rows.past;
      r.keys = l.keys + shared(l, rows, g) + row * key_width_;
      r.queries = l.queries + shared(l, rows, g) + row * key_width_;
      r.y = l.y + (rows.first + row) * values_ + head * width_;
      kernels_.recur(r);
      for (int64_t i = 0; i < r.rows; i++)
        kernels_.multiply(Gate::silu, inputs.input(from + i) - values_ + head * width_, width_, r.y + i * values_);
    }
    for (int64_t token = last; token < end; token++) {
      float* to = logged(l, place, token) + keys_;
      std::copy_n(r.deltas + (token - last) * width_, width_, to + head * width_);
      to[values_ + head] = decays[static_cast<size_t>(token - last)];
    }
    inputs.keep(end, head * width_, width_);
  }

  void keep(const Layer& l, const Rows& rows, const Place& place, int64_t g) const {
    const Ring inputs = ring(l, rows, place);
    const int64_t end = rows.past + rows.count;
    for (int64_t token = std::max(rows.past, end - kLogged); token < end; token++) {
      const float* key = l.keys + shared(l, rows, g) + (token - rows.past) * key_width_;
      std::copy_n(key, key_width_, logged(l, place, token) + g * key_width_);
    }
    for (const int64_t first : {values_, values_ + keys_}) inputs.keep(end, first + g * key_width_, key_width_);
  }

  const Kernels& kernels_;
  int64_t heads_, width_, groups_, key_width_, values_ = 0, keys_ = 0;
  float epsilon_;
};

}  // namespace edgespec
