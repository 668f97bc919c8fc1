// Logits: with a bound, of the tokens of a few clusters, and the most likely of each row.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "context.h"

namespace edgespec {

// Logits with a bound: most * tanh(z / most).
class Cap {
 public:
  static constexpr const char* kName = "Cap";
  static constexpr ort::Inputs kInputs{{{"x", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  Cap(const Info& info, const Host& host) : kernels_(host.kernels), most_(info.real("most")) {
    require(most_ > 0, "the bound of logits is not above 0");
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]);
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
  static constexpr ort::Inputs kInputs{{
      {"x", ort::kFloat}, {"scores", ort::kFloat}, {"tokens", ort::kInt64}, {"weights", ort::kUint8}}};
  static constexpr std::array kOutputs = {ort::kFloat};

  Clusters(const Info& info, const Host& host)
      : kernels_(host.kernels), inputs_(info.number("inputs")), clusters_(info.number("clusters")),
        read_(info.number("read")) {
    const Tensor tokens = info.constant(kInputs["tokens"]);
    require(tokens.shape.size() == 1, "the tokens of clusters are no list of int64");
    part_ = part_of(info.text("format"), tokens.size(), inputs_, info.constant(kInputs["weights"]));
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
    const Tensor x = pass.input(kInputs["x"]), scores = pass.input(kInputs["scores"]);
    require(x.shape.size() == 3 && x.last() == inputs_ &&
                scores.shape == Shape{x.shape[0], x.shape[1], clusters_},
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

// The first of a row's largest logits, and its probability: NaN if the row has NaN, or if that logit is not finite.
class Choose {
 public:
  static constexpr const char* kName = "Choose";
  static constexpr ort::Inputs kInputs{{{"logits", ort::kFloat}}};
  static constexpr std::array kOutputs = {ort::kInt64, ort::kFloat};

  Choose(const Info&, const Host& host) : kernels_(host.kernels) {}

  void run(const Pass& pass) const {
    const Tensor logits = pass.input(kInputs["logits"]);
    const bool shaped = logits.shape.size() == 3;
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
