// The inputs of a convolution over tokens, of which a sequence keeps the last in a ring.
#pragma once

#include <algorithm>
#include <vector>

#include "sequences.h"

namespace edgespec {

constexpr int64_t kWidestHead = 1 << 12, kMostTaps = 64;

// A tensor that a layer keeps of its sequences, behind the pass.
inline float* kept_as(const Pass& pass, size_t index, const Shape& shape) {
  const Tensor past = pass.input(index);
  require(past.shape == shape, "a state is not shaped as its layer");
  return kept<float>(pass, index, past);
}

// Token t has the row t modulo the ring's length, which is the number of rows that a layer can undo more than the
// convolution looks back.
struct Ring {
  const Kernels& kernels;
  float* rows;          // (length, channels), of the sequence
  const float* inputs;  // the channels of the sequence's first row in the pass, of rows `stride` apart
  int64_t stride, channels, taps, past;
  const float *weights, *bias;  // (taps, channels), (channels); or no bias

  int64_t length() const { return kLogged + taps - 1; }
  const float* input(int64_t token) const { return inputs + (token - past) * stride; }

  // `count` channels of `token`, from `channel` on, behind the convolution and SiLU.
  void convolve(int64_t token, int64_t channel, int64_t count, float* y) const {
    static constexpr float kZeros[kWidestHead] = {};
    const float* taken[kMostTaps];
    for (int64_t t = 0; t < taps; t++) {
      const int64_t at = token - taps + 1 + t;
      taken[t] = at < 0      ? kZeros
                 : at < past ? rows + at % length() * channels + channel
                             : input(at) + channel;
    }
    kernels.convolve(taken, taps, weights + channel, channels, count, y);
    for (int64_t i = 0; bias != nullptr && i < count; i++) y[i] += bias[channel + i];
    kernels.multiply(Gate::sigmoid, y, count, y);
  }

  // Keeps `count` channels of the tokens before `end`, behind all convolutions of these channels.
  void keep(int64_t end, int64_t channel, int64_t count) const {
    for (int64_t token = std::max(past, end - length()); token < end; token++)
      std::copy_n(input(token) + channel, count, rows + token % length() * channels + channel);
  }
};

}  // namespace edgespec
