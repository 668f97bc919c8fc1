// Gates of attention's heads.
#pragma once

#include <algorithm>
#include <array>

#include "linear.h"

namespace edgespec {

// The outputs of heads, side by side, times the sigmoids of numbers, of which each head has one (LFM3).
class HeadGate {
 public:
  static constexpr const char* kName = "HeadGate";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat};
  static constexpr std::array kOutputs = {ort::kFloat};

  HeadGate(const Info&, const Host& host) : kernels_(host.kernels) {}

  void run(const Pass& pass) const {
    const Tensor x = pass.input(0), gates = pass.input(1);
    const bool typed = x.type == ort::kFloat && gates.type == ort::kFloat;
    const bool shaped = typed && x.shape.size() == 3 && gates.shape.size() == 3 && x.shape[0] == 1 &&
                        gates.shape[0] == 1 && x.shape[1] == gates.shape[1];
    require(shaped && gates.last() > 0 && x.last() % gates.last() == 0,
            "the gates of heads do not fit the outputs of heads");
    const int64_t rows = x.shape[1], width = x.last(), heads = gates.last(), head_dim = width / heads;
    auto* y = pass.output<float>(0, x.shape);
    const Buffer<float> shares(gates.size());
    std::fill_n(shares.get(), gates.size(), 1.0f);
    kernels_.multiply(Gate::sigmoid, gates.floats(), gates.size(), shares.get());
    const auto row = [&](int64_t i) {
      for (int64_t head = i * heads; head < (i + 1) * heads; head++) {
        const float share = shares.get()[head];
        const float* from = x.floats() + head * head_dim;
        for (int64_t n = 0; n < head_dim; n++) y[head * head_dim + n] = from[n] * share;
      }
    };
    if (rows <= kFewRows)
      for (int64_t i = 0; i < rows; i++) row(i);
    else
      pass.spread(rows, row);
  }

 private:
  static constexpr int64_t kFewRows = 8;

  const Kernels& kernels_;
};

}  // namespace edgespec
