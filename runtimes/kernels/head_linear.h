// Products of heads, each with a matrix of its own.
#pragma once

#include <array>

#include "context.h"

namespace edgespec {

// The first `inputs` numbers of each head times the head's matrix, and behind the product the head's other numbers as
// they are. The matrices (outputs, inputs) lie one below the other.
class HeadLinear {
 public:
  static constexpr const char* kName = "HeadLinear";
  static constexpr ort::Inputs kInputs{{{"x", ort::kFloat}, {"weights", ort::kUint8}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  HeadLinear(const Info& info, const Host& host)
      : kernels_(host.kernels),
        pages_(host.pages()),
        heads_(info.number("heads")),
        inputs_(info.number("inputs")),
        outputs_(info.number("width")) {
    const bool sound = heads_ > 0 && heads_ < kMost && outputs_ > 0 && outputs_ < kMost && outputs_ % kLanes == 0;
    require(sound, "products of heads have an impossible width");
    part_ = part_of(info.text("format"), heads_ * outputs_, inputs_, info.constant(kInputs["weights"]));
    const size_t bytes = part_.bytes(inputs_);
    if (pages_ != nullptr) part_.tiles = pages_->copy(part_.tiles, bytes);
    plane_ = static_cast<int64_t>(bytes) / heads_;
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]);
    const bool fits = x.shape.size() == 3 && x.shape[0] == 1 && x.last() % heads_ == 0 && x.last() / heads_ >= inputs_;
    require(fits, "the input of products of heads is not float32 (1, rows, heads)");
    const int64_t rows = x.shape[1], width = x.last() / heads_, rest = width - inputs_, made = outputs_ + rest;
    auto* y = pass.output<float>(0, {1, rows, heads_ * made});
    if (rows == 0) return;
    const int64_t blocks = inputs_ / kBlock;
    const Buffer<Activations> activations(heads_ * blocks * rows);
    const Buffer<float> factors(heads_ * rows);
    pass.spread(heads_, [&](int64_t head) {
      const Part part = {part_.tiles + head * plane_, outputs_, part_.format};
      Activations* rounded = activations.get() + head * blocks * rows;
      float* own = factors.get() + head * rows;
      for (int64_t r = 0; r < rows; r++) {
        const float* from = x.floats() + (r * heads_ + head) * width;
        own[r] = kernels_.quantize(from, inputs_, rounded + r, rows);
        std::copy_n(from + inputs_, rest, y + (r * heads_ + head) * made + outputs_);
      }
      Projection p{};
      p.parts = &part;
      p.part_count = 1;
      p.inputs = inputs_;
      p.width = heads_ * made;
      p.rows = p.stride = rows;
      p.activations = rounded;
      p.factors = own;
      p.y = y + head * made;
      kernels_.project(p, 0, part.tile_count());
    });
  }

 private:
  const Kernels& kernels_;
  std::shared_ptr<Pages> pages_;
  int64_t heads_, inputs_, outputs_;
  Part part_{};
  int64_t plane_ = 0;  // bytes of a head's matrix
};

}  // namespace edgespec
