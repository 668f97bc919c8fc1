// Rows of a table by tokens: embeddings, and inputs of layers.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "context.h"

namespace edgespec {

// Rows of a matrix, one for each token, times a factor.
class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr ort::Inputs kInputs{{{"ids", ort::kInt64}, {"table", ort::kUint8}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  Embedding(const Info& info, const Host& host)
      : kernels_(host.kernels),
        pages_(host.pages()),
        inputs_(info.number("width")),
        factor_(info.real("factor")),
        part_(part_of(info.text("format"), info.number("rows"), inputs_, info.constant(kInputs["table"]))) {}

  void run(const Pass& pass) const {
    const Tensor ids = tokens_of(pass);
    std::vector<int64_t> shape(ids.shape.begin(), ids.shape.end());
    shape.push_back(inputs_);
    auto* y = pass.output<float>(0, shape);
    pass.spread(ids.size(), [&](int64_t i) { row(ids, i, y + i * inputs_); });
  }

  Tensor tokens_of(const Pass& pass) const {
    const Tensor ids = pass.input(kInputs["ids"]);
    const auto* tokens = static_cast<const int64_t*>(ids.data);
    for (int64_t i = 0; i < ids.size(); i++)
      require(tokens[i] >= 0 && tokens[i] < part_.columns, "a token is not in the vocabulary");
    return ids;
  }

  void row(const Tensor& ids, int64_t i, float* y) const {
    Part part = part_;
    if (pages_ != nullptr) part.tiles = pages_->copied(part.tiles);  // by an LM head that is tied to it
    kernels_.gather(part, inputs_, static_cast<const int64_t*>(ids.data)[i], factor_, y);
  }

 private:
  const Kernels& kernels_;
  std::shared_ptr<Pages> pages_;
  int64_t inputs_;
  float factor_;
  Part part_;
};

// Inputs of layers from the tokens: `part` numbers for each layer, one layer behind the other. They are the sum of a
// row of a matrix and a product of the embedding, which is normalized layer by layer. The sum keeps its mean square. The
// first inputs of the operator are those of Embedding.
class LayerInputs {
 public:
  static constexpr const char* kName = "LayerInputs";
  static constexpr ort::Inputs kInputs{{
      {"ids", ort::kInt64}, {"table", ort::kUint8}, {"product", ort::kFloat}, {"gain", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  LayerInputs(const Info& info, const Host& host)
      : rows_(info, host), kernels_(host.kernels), width_(info.number("width")), part_(info.number("part")),
        epsilon_(info.real("epsilon")) {
    require(part_ > 0 && width_ % part_ == 0, "the inputs of layers are no multiple of one layer's");
  }

  void run(const Pass& pass) const {
    const Tensor ids = rows_.tokens_of(pass);
    const int64_t count = ids.size();
    const Tensor product = pass.input(kInputs["product"]);
    require(product.shape.size() == 3 && product.size() == count * width_,
            "the product of the embedding is not float32 (1, tokens, inputs of all layers)");
    const float* gain = pass.vector(kInputs["gain"], part_, "a gain is not as wide as a layer's inputs");
    auto* y = pass.output<float>(0, product.shape);
    pass.spread(count, [&](int64_t i) {
      const Buffer<float> row(width_);
      rows_.row(ids, i, row.get());
      const float* x = product.floats() + i * width_;
      float* to = y + i * width_;
      for (int64_t at = 0; at < width_; at += part_)
        kernels_.normalize(x + at, gain, epsilon_, part_, to + at);
      for (int64_t at = 0; at < width_; at++) to[at] = (to[at] + row.get()[at]) * 0.70710678f;
    });
  }

 private:
  Embedding rows_;
  const Kernels& kernels_;
  int64_t width_, part_;
  float epsilon_;
};

}  // namespace edgespec
