// Rows of a matrix, and the most likely column of a row.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "linear.h"

namespace edgespec {

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr std::array kInputs = {ort::kInt64, ort::kUint8};
  static constexpr std::array kOutputs = {ort::kFloat};

  Embedding(const Info& info, const Host& host)
      : kernels_(host.kernels),
        pages_(host.pages()),
        inputs_(info.number("width")),
        factor_(info.real("factor")),
        part_(part_of(info.text("format"), info.number("rows"), inputs_, info.constant(1))) {}

  void run(const Pass& pass) const {
    const Tensor ids = tokens_of(pass);
    std::vector<int64_t> shape = ids.shape;
    shape.push_back(inputs_);
    auto* y = pass.output<float>(0, shape);
    pass.spread(ids.size(), [&](int64_t i) { row(ids, i, y + i * inputs_); });
  }

  Tensor tokens_of(const Pass& pass) const {
    const Tensor ids = pass.input(0);
    require(ids.type == ort::kInt64, "tokens are not int64");
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
// row of a matrix and a product of the embedding, which is normalized layer by layer. The sum keeps its mean square.
class LayerInputs {
 public:
  static constexpr const char* kName = "LayerInputs";
  static constexpr std::array kInputs = {ort::kInt64, ort::kUint8, ort::kFloat, ort::kFloat};
  static constexpr std::array kOutputs = {ort::kFloat};

  LayerInputs(const Info& info, const Host& host)
      : rows_(info, host), kernels_(host.kernels), width_(info.number("width")), part_(info.number("part")),
        epsilon_(info.real("epsilon")) {
    require(part_ > 0 && width_ % part_ == 0, "the inputs of layers are no multiple of one layer's");
  }

  void run(const Pass& pass) const {
    const Tensor ids = rows_.tokens_of(pass);
    const int64_t count = ids.size();
    const Tensor product = pass.input(2);
    require(product.type == ort::kFloat && product.shape.size() == 3 && product.size() == count * width_,
            "the product of the embedding is not float32 (1, tokens, inputs of all layers)");
    const float* gain = pass.vector(3, part_, "a gain is not as wide as a layer's inputs");
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

// A layer's input of a token times its activated gate: x (1, tokens, part), inputs of all layers.
class InputGate {
 public:
  static constexpr const char* kName = "InputGate";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat};
  static constexpr std::array kOutputs = {ort::kFloat};

  InputGate(const Info& info, const Host& host)
      : kernels_(host.kernels), layer_(info.number("layer")), gate_(gate_of(info.text("gate"))) {
    require(gate_ != Gate::none, "the inputs of a layer have no gate");
    require(layer_ >= 0 && layer_ < kMost, "a layer has an impossible number");
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(0), all = pass.input(1);
    const bool typed = x.type == ort::kFloat && all.type == ort::kFloat;
    const bool shaped = typed && x.shape.size() == 3 && all.shape.size() == 3 && x.shape[0] == 1 &&
                        all.shape[0] == 1 && x.shape[1] == all.shape[1];
    require(shaped && x.last() <= all.last() / (layer_ + 1),
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

// Logits with a bound: most * tanh(z / most).
class Cap {
 public:
  static constexpr const char* kName = "Cap";
  static constexpr std::array kInputs = {ort::kFloat};
  static constexpr std::array kOutputs = {ort::kFloat};

  Cap(const Info& info, const Host& host) : kernels_(host.kernels), most_(info.real("most")) {
    require(most_ > 0, "the bound of logits is not above 0");
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(0);
    require(x.type == ort::kFloat, "logits are not float32");
    auto* y = pass.output<float>(0, x.shape);
    const int64_t chunks = (x.size() + kChunk - 1) / kChunk;
    pass.spread(chunks, [&](int64_t i) {
      const int64_t first = i * kChunk;
      kernels_.cap(x.floats() + first, std::min(kChunk, x.size() - first), most_, y + first);
    });
  }

 private:
  static constexpr int64_t kChunk = 8192;

  const Kernels& kernels_;
  float most_;
};

// Logits of the tokens of a few clusters. Each row reads the `read` clusters with the highest scores; of equal scores
// the first counts. The matrix has the rows of a cluster one below the other, and `tokens` are their tokens. All other
// tokens get a logit far below any of these.
class Clusters {
 public:
  static constexpr const char* kName = "Clusters";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat, ort::kInt64, ort::kUint8};
  static constexpr std::array kOutputs = {ort::kFloat};

  Clusters(const Info& info, const Host& host)
      : kernels_(host.kernels), inputs_(info.number("inputs")), clusters_(info.number("clusters")),
        read_(info.number("read")) {
    const Tensor tokens = info.constant(2);
    require(tokens.type == ort::kInt64 && tokens.shape.size() == 1, "the tokens of clusters are no list of int64");
    part_ = part_of(info.text("format"), tokens.size(), inputs_, info.constant(3));
    require(read_ > 0 && read_ <= clusters_ && clusters_ < kMost && part_.columns % (clusters_ * kLanes) == 0,
            "clusters are not of as many whole tiles each, or none is read");
    tokens_ = static_cast<const int64_t*>(tokens.data);
    std::vector<bool> seen(static_cast<size_t>(part_.columns));
    for (int64_t i = 0; i < part_.columns; i++) {
      const bool is_new = tokens_[i] >= 0 && tokens_[i] < part_.columns && !seen[static_cast<size_t>(tokens_[i])];
      require(is_new, "a token is in two clusters, or in no vocabulary");
      seen[static_cast<size_t>(tokens_[i])] = true;
    }
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(0), scores = pass.input(1);
    const bool typed = x.type == ort::kFloat && scores.type == ort::kFloat && x.shape.size() == 3;
    require(typed && x.last() == inputs_ && scores.shape == std::vector{x.shape[0], x.shape[1], clusters_},
            "the input of clusters is not float32 (1, rows, inputs), with a score for each cluster");
    const int64_t rows = x.size() / inputs_, columns = part_.columns, blocks = inputs_ / kBlock;
    auto* y = pass.output<float>(0, {x.shape[0], x.shape[1], columns});
    const Buffer<Activations> activations(rows * blocks);
    const Buffer<float> factors(rows);
    const Buffer<int64_t> chosen(rows * read_);
    pass.spread(rows, [&](int64_t r) {
      factors.get()[r] = kernels_.quantize(x.floats() + r * inputs_, inputs_, activations.get() + r * blocks, 1);
      choose(scores.floats() + r * clusters_, chosen.get() + r * read_);
      std::fill_n(y + r * columns, columns, kUnread);
    });
    const int64_t size = columns / clusters_, bytes = static_cast<int64_t>(part_.bytes(inputs_)) / clusters_;
    pass.spread(rows * read_, [&](int64_t i) {
      const int64_t r = i / read_, cluster = chosen.get()[i];
      const Part part = {part_.tiles + cluster * bytes, size, part_.format};
      const Buffer<float> logits(size);
      Projection p{};
      p.parts = &part;
      p.part_count = p.rows = p.stride = 1;
      p.inputs = inputs_;
      p.width = size;
      p.activations = activations.get() + r * blocks;
      p.factors = factors.get() + r;
      p.y = logits.get();
      kernels_.project(p, 0, part.tile_count());
      for (int64_t at = 0; at < size; at++) y[r * columns + tokens_[cluster * size + at]] = logits.get()[at];
    });
  }

 private:
  static constexpr float kUnread = -1e30f;

  void choose(const float* scores, int64_t* chosen) const {
    const Buffer<float> left(clusters_);
    std::copy_n(scores, clusters_, left.get());
    for (int64_t i = 0; i < read_; i++) {
      float most;
      kernels_.largest(left.get(), clusters_, &most, chosen + i);
      left.get()[chosen[i]] = -__builtin_inff();
    }
  }

  const Kernels& kernels_;
  int64_t inputs_, clusters_, read_;
  Part part_{};
  const int64_t* tokens_ = nullptr;
};

// NaN if a row has NaN, or if its largest logit is not finite.
class Choose {
 public:
  static constexpr const char* kName = "Choose";
  static constexpr std::array kInputs = {ort::kFloat};
  static constexpr std::array kOutputs = {ort::kInt64, ort::kFloat};

  Choose(const Info&, const Host& host) : kernels_(host.kernels) {}

  void run(const Pass& pass) const {
    const Tensor logits = pass.input(0);
    const bool shaped = logits.type == ort::kFloat && logits.shape.size() == 3;
    require(shaped && logits.last() > 0 && logits.last() < kMost, "logits are not float32 (1, rows, columns)");
    const int64_t columns = logits.last(), rows = logits.size() / columns;
    auto* best = pass.output<int64_t>(0, {1, rows});
    auto* likely = pass.output<float>(1, {1, rows});
    const int64_t chunks = (columns + kChunk - 1) / kChunk;
    std::vector<float> tops(static_cast<size_t>(rows * chunks)), totals(tops.size());
    std::vector<int64_t> places(tops.size());
    const auto each_chunk = [&](const auto& run) {
      pass.spread(rows * chunks, [&](int64_t i) {
        const int64_t row = i / chunks, first = i % chunks * kChunk;
        run(static_cast<size_t>(i), row, first, logits.floats() + row * columns + first,
            std::min(kChunk, columns - first));
      });
    };
    each_chunk([&](size_t i, int64_t, int64_t first, const float* x, int64_t count) {
      kernels_.largest(x, count, &tops[i], &places[i]);
      places[i] += first;
    });
    std::vector<float> top(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; row++) {
      const auto first = tops.begin() + row * chunks;
      const auto most = std::max_element(first, first + chunks);  // the first of equals
      top[static_cast<size_t>(row)] = *most;
      best[row] = places[static_cast<size_t>(most - tops.begin())];
    }
    each_chunk([&](size_t i, int64_t row, int64_t, const float* x, int64_t count) {
      totals[i] = kernels_.sum_exp(x, count, top[static_cast<size_t>(row)]);
    });
    for (int64_t row = 0; row < rows; row++) {
      float total = 0;
      for (int64_t i = row * chunks; i < (row + 1) * chunks; i++) total = total + totals[static_cast<size_t>(i)];
      const float most = top[static_cast<size_t>(row)];
      likely[row] = 1.0f / total + (most - most);  // NaN if the largest is not finite
    }
  }

 private:
  static constexpr int64_t kChunk = 8192;  // for any threads: the order of sums determines the bits

  const Kernels& kernels_;
};

}  // namespace edgespec
