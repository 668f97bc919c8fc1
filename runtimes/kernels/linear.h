// Projections: normalization, rounding of activations, products, bias, gate, residual.
#pragma once

#include <array>

#include "context.h"

namespace edgespec {

inline Gate gate_of(const std::string& name) {
  if (name.empty()) return Gate::none;
  if (name == "silu") return Gate::silu;
  if (name == "clamped") return Gate::clamped;
  if (name == "squared") return Gate::squared;
  if (name == "xielu") return Gate::xielu;
  require(name == "gelu", "a gate is neither silu nor gelu nor clamped nor squared nor xielu");
  return Gate::gelu;
}

// y = [residual +] [norm of] gate(norm(x) W + bias)
class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr ort::Inputs kInputs{{
      {"x", ort::kFloat}, {"gain", ort::kFloat, ort::kOptional}, {"bias", ort::kFloat, ort::kOptional},
      {"post_gain", ort::kFloat, ort::kOptional}, {"residual", ort::kFloat, ort::kOptional},
      {"weights", ort::kUint8, ort::kVariadic}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  Linear(const Info& info, const Host& host)
      : kernels_(host.kernels),
        pages_(host.pages()),
        inputs_(info.number("inputs")),
        epsilon_(info.real("epsilon")),
        gate_(gate_of(info.text("gate"))),
        bend_{info.real("above", 0), info.real("below", 0), info.real("slope", 0)},
        parts_(parts_of(info, info.text("parts"), inputs_, kInputs["weights"])) {
    const size_t half = parts_.size() / 2;
    if (has_factor(gate_)) {
      require(parts_.size() % 2 == 0, "a gated projection has an odd number of parts");
      for (size_t i = 0; i < half; i++)
        require(parts_[i].columns == parts_[half + i].columns, "a gate is not as wide as what it multiplies");
    }
    int64_t bytes = 0;
    for (size_t i = 0; i < (has_factor(gate_) ? half : parts_.size()); i++) {
      width_ += parts_[i].columns;
      tiles_ += parts_[i].tile_count();
      bytes += static_cast<int64_t>(parts_[i].bytes(inputs_));
    }
    Weights weights;
    for (Part& part : parts_) {
      if (pages_ == nullptr) continue;
      const Mapped mapped{part.tiles, part.bytes(inputs_)};
      part.tiles = pages_->copy(mapped.data, mapped.size);
      if (part.tiles == mapped.data && !pages_->all()) weights.mapped.push_back(mapped);
    }
    // A piece is worth waking a thread, and there are enough pieces for threads of uneven speed. With up to 256 pieces
    // instead of kChunks, passes of two threads took up to 4 % longer.
    chunks_ = std::clamp<int64_t>(bytes / kChunkBytes, 1, std::min<int64_t>(kChunks, tiles_));
    const std::shared_ptr<Crew> crew = host.crew();
    weights.starts.resize(static_cast<size_t>(crew->threads()));
    for (int64_t t = 0; t < std::min(crew->threads(), chunks_); t++)
      weights.starts[static_cast<size_t>(t)] = start(crew->first(chunks_, t));
    weights_ = crew->follow(std::move(weights));
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]);
    require(x.shape.size() == 3 && x.last() == inputs_, "a projection's input is not float32 (1, rows, inputs)");
    const int64_t rows = x.size() / inputs_;
    const float* gain = pass.vector(kInputs["gain"], inputs_, "a normalization's gain is not as wide as its input");
    Projection p{};
    p.parts = parts_.data();
    p.part_count = static_cast<int64_t>(parts_.size());
    p.inputs = inputs_;
    p.gate = gate_;
    p.bend = bend_;
    p.width = width_;
    p.rows = p.stride = rows;
    const int64_t biases = has_factor(gate_) ? 2 * width_ : width_;
    p.bias = pass.vector(kInputs["bias"], biases, "a bias is not as wide as its projection");
    if (p.bias != nullptr && has_factor(gate_)) p.other_bias = p.bias + width_;
    const float* post_gain = pass.vector(kInputs["post_gain"], width_, "a gain is not as wide as its projection");
    const float* residual =
        pass.vector(kInputs["residual"], rows * width_, "a residual is not shaped as its projection");
    p.y = pass.output<float>(0, {x.shape[0], x.shape[1], width_});
    if (rows == 0) return;
    p.residual = post_gain == nullptr ? residual : nullptr;
    const Buffer<Activations> activations(rows * (inputs_ / kBlock));
    const Buffer<float> factors(rows);
    p.activations = activations.get();
    p.factors = factors.get();
    round(pass, x.floats(), gain, rows, activations.get(), factors.get());
    const auto piece = [&](int64_t i) {
      kernels_.project(p, tiles_ * i / chunks_, tiles_ * (i + 1) / chunks_);
    };
    if (weights_->next != nullptr)
      for (const Mapped& mapped : weights_->next->mapped) mapped.ask();
    pass.spread(chunks_, piece, weights_);
    if (post_gain != nullptr) add_normalized(pass, p, post_gain, residual);
  }

 private:
  static constexpr int64_t kChunkBytes = 48 << 10, kChunks = 32, kRounded = 1 << 10;

  // The first tiles of a piece: of its part, and with a gate of the part that it multiplies.
  std::array<const uint8_t*, 2> start(int64_t chunk) const {
    int64_t tile = tiles_ * chunk / chunks_;
    size_t part = 0;
    while (part + 1 < parts_.size() && tile >= parts_[part].tile_count()) tile -= parts_[part++].tile_count();
    const auto at = [&](const Part& matrix) {
      return matrix.tiles + tile * static_cast<int64_t>(matrix.bytes(inputs_)) / matrix.tile_count();
    };
    return {at(parts_[part]), has_factor(gate_) ? at(parts_[part + parts_.size() / 2]) : nullptr};
  }

  void round(const Pass& pass, const float* x, const float* gain, int64_t rows, Activations* y,
             float* factors) const {
    const auto row = [&](int64_t r, float* normed) {
      const float* from = x + r * inputs_;
      if (gain != nullptr) {
        kernels_.normalize(from, gain, epsilon_, inputs_, normed);
        from = normed;
      }
      factors[r] = kernels_.quantize(from, inputs_, y + r, rows);
    };
    const int64_t pieces = std::clamp<int64_t>(rows * inputs_ / kRounded, 1, rows);
    pass.spread(pieces, [&](int64_t i) {
      const Buffer<float> normed(gain != nullptr ? inputs_ : 0);
      for (int64_t r = rows * i / pieces; r < rows * (i + 1) / pieces; r++) row(r, normed.get());
    });
  }

  void add_normalized(const Pass& pass, const Projection& p, const float* gain, const float* residual) const {
    pass.spread(p.rows, [&](int64_t r) {
      float* y = p.y + r * width_;
      kernels_.normalize(y, gain, epsilon_, width_, y);
      if (residual != nullptr)
        for (int64_t c = 0; c < width_; c++) y[c] = residual[r * width_ + c] + y[c];
    });
  }

  const Kernels& kernels_;
  std::shared_ptr<Pages> pages_;
  int64_t inputs_;
  float epsilon_;
  Gate gate_;
  Bend bend_;
  std::vector<Part> parts_;
  int64_t width_ = 0, tiles_ = 0, chunks_ = 1;
  const Weights* weights_ = nullptr;
};

}  // namespace edgespec
