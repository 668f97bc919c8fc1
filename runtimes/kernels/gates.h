// Gates of attention's heads, and of the inputs of layers.
#pragma once

#include <algorithm>
#include <array>

#include "linear.h"

namespace edgespec {

// Whether two inputs are float32 (1, rows, widths of their own).
inline bool same_rows(const Tensor& x, const Tensor& y) {
  return x.shape.size() == 3 && y.shape.size() == 3 && x.shape[0] == 1 && y.shape[0] == 1 && x.shape[1] == y.shape[1];
}

// The outputs of heads, side by side, times the sigmoids or softplus of numbers. Each is the factor of as many outputs:
// those of a head (LFM3, Laguna), or one (Muse Glimmer).
class HeadGate {
 public:
  static constexpr const char* kName = "HeadGate";
  static constexpr ort::Inputs kInputs{{{"x", ort::kFloat}, {"gates", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  HeadGate(const Info& info, const Host& host) : kernels_(host.kernels), softplus_(info.number("softplus", 0) != 0) {}

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]), gates = pass.input(kInputs["gates"]);
    require(same_rows(x, gates) && gates.last() > 0 && x.last() % gates.last() == 0,
            "the gates of heads do not fit the outputs of heads");
    const int64_t rows = x.shape[1], width = x.last(), heads = gates.last(), head_dim = width / heads;
    auto* y = pass.output<float>(0, x.shape);
    const Buffer<float> shares(gates.size());
    if (softplus_) {
      const std::vector<float> zeros(static_cast<size_t>(gates.size()));
      const Buffer<float> unused(gates.size());
      kernels_.decay(gates.floats(), zeros.data(), zeros.data(), gates.size(), unused.get(), shares.get());
    } else {
      std::fill_n(shares.get(), gates.size(), 1.0f);
      kernels_.multiply(Gate::sigmoid, gates.floats(), gates.size(), shares.get());
    }
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
  bool softplus_;
};

// A layer's input of a token times its activated gate: x (1, tokens, part), inputs of all layers.
class InputGate {
 public:
  static constexpr const char* kName = "InputGate";
  static constexpr ort::Inputs kInputs{{{"x", ort::kFloat}, {"inputs", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  InputGate(const Info& info, const Host& host)
      : kernels_(host.kernels), layer_(info.number("layer")), gate_(gate_of(info.text("gate"))) {
    require(has_factor(gate_), "the inputs of a layer have no gate");
    require(layer_ >= 0 && layer_ < kMost, "a layer has an impossible number");
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]), all = pass.input(kInputs["inputs"]);
    require(same_rows(x, all) && x.last() <= all.last() / (layer_ + 1),
            "a layer's gate does not fit the inputs of all layers");
    const int64_t part = x.last(), step = all.last();
    auto* y = pass.output<float>(0, x.shape);
    for (int64_t i = 0; i < x.shape[1]; i++) {
      const float* from = all.floats() + i * step + layer_ * part;
      std::copy(from, from + part, y + i * part);
      kernels_.multiply(gate_, x.floats() + i * part, part, y + i * part);
    }
  }

 private:
  const Kernels& kernels_;
  int64_t layer_;
  Gate gate_;
};

}  // namespace edgespec
