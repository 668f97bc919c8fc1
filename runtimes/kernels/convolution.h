// Short convolutions over tokens, gated on both sides.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "sequences.h"

namespace edgespec {

// y_t = C_t * sum(w_j * u_(t - taps + 1 + j)) with u = B * X, where a row of the input is B, C and X side by side
// (LFM2). Rows before a sequence's first token are zeros.
//
// Each sequence has a ring of rows of u: token t has row t % (16 + taps - 1), so nothing moves when rows are undone.
// The taps - 1 rows before each multiple of 32 tokens lie in blocks instead, as keys and values do. So a sequence can
// go on from these tokens without a ring.
class ShortConv {
 public:
  static constexpr const char* kName = "ShortConv";
  static constexpr ort::Inputs kInputs{{
      {"gated", ort::kFloat}, {"ring", ort::kFloat}, {"ends", ort::kFloat}, {"sequences", ort::kInt64},
      {"blocks", ort::kInt64}, {"places", ort::kInt64}, {"weights", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat, ort::kFloat};

  ShortConv(const Info& info, const Host&) : channels_(info.number("channels")), taps_(info.number("taps")) {
    require(taps_ > 1 && taps_ <= kLogged, "a convolution has an impossible number of taps");
    require(channels_ > 0 && channels_ < kMost, "a convolution has an impossible number of channels");
  }

  void run(const Pass& pass) const {
    const Tensor gated = pass.input(kInputs["gated"]), taps = pass.input(kInputs["weights"]);
    const Tensor ring = pass.input(kInputs["ring"]), ends = pass.input(kInputs["ends"]);
    require(gated.shape.size() == 3 && gated.last() == 3 * channels_,
            "a convolution's input is not float32 (1, rows, three times the channels)");
    require(taps.shape == Shape{taps_, channels_}, "a convolution's weights are not float32 (taps, channels)");
    require(ring.shape.size() == 3 && ring.shape[1] == length() && ring.shape[2] == channels_,
            "a convolution's ring is not float32 (slots, 16 + taps - 1, channels)");
    require(ends.shape.size() == 3 && ends.shape[1] == taps_ - 1 && ends.shape[2] == channels_,
            "a convolution's ends of blocks are not float32 (blocks, taps - 1, channels)");
    const int64_t rows = gated.size() / (3 * channels_);
    std::vector<Rows> sequences = sequences_of(pass.input(kInputs["sequences"]), rows);
    give_blocks(sequences, pass.input(kInputs["blocks"]), ends.shape[0], true);
    const std::vector<Place> places = places_of(pass.input(kInputs["places"]), sequences, ring.shape[0]);
    State s{};
    s.gated = gated.floats();
    s.taps = taps.floats();
    s.y = pass.output<float>(0, {gated.shape[0], gated.shape[1], channels_});
    float* rings = kept<float>(pass, 1, ring);
    s.ends = kept<float>(pass, 2, ends);
    const int64_t pieces = (channels_ + kPiece - 1) / kPiece;
    const auto piece = [&](int64_t i) {
      const int64_t first = i * kPiece, count = std::min(kPiece, channels_ - first);
      for (size_t at = 0; at < sequences.size(); at++) {
        State own = s;
        own.ring = rings + places[at].slot * length() * channels_;
        convolve(own, sequences[at], first, count);
      }
    };
    if (rows <= kFewRows)
      for (int64_t i = 0; i < pieces; i++) piece(i);
    else
      pass.spread(pieces, piece);
  }

 private:
  static constexpr int64_t kFewRows = 8, kPiece = 256;

  struct State {
    const float *gated, *taps;
    float *ring, *ends, *y;
  };

  int64_t length() const { return kLogged + taps_ - 1; }

  // The place of u of token `t`.
  float* row(const State& s, const Rows& rows, int64_t t) const {
    const int64_t at = t % kTokens - (kTokens - taps_ + 1);
    if (at < 0) return s.ring + t % length() * channels_;
    return s.ends + (rows.blocks[t / kTokens] * (taps_ - 1) + at) * channels_;
  }

  // Computes `count` channels of a sequence's rows. Sums begin with the oldest token.
  void convolve(const State& s, const Rows& rows, int64_t first, int64_t count) const {
    for (int64_t i = 0; i < rows.count; i++) {
      const int64_t t = rows.past + i;
      const float* b = s.gated + (rows.first + i) * 3 * channels_ + first;
      const float *c = b + channels_, *x = c + channels_;
      float* u = row(s, rows, t) + first;
      float* y = s.y + (rows.first + i) * channels_ + first;
      for (int64_t n = 0; n < count; n++) u[n] = b[n] * x[n];
      std::fill(y, y + count, 0.0f);
      for (int64_t j = std::max<int64_t>(0, taps_ - 1 - t); j < taps_; j++) {
        const float *w = s.taps + j * channels_ + first, *v = row(s, rows, t - taps_ + 1 + j) + first;
        for (int64_t n = 0; n < count; n++) y[n] = y[n] + w[n] * v[n];
      }
      for (int64_t n = 0; n < count; n++) y[n] = y[n] * c[n];
    }
  }

  int64_t channels_, taps_;
};

}  // namespace edgespec
