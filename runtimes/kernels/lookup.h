// Rows of a matrix, and the most likely column of a row.
#pragma once

#include <array>
#include <vector>

#include "context.h"

namespace edgespec {

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr std::array kInputs = {ort::kInt64, ort::kUint8};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kRequired};
  static constexpr std::array kOutputs = {ort::kFloat};

  Embedding(const Info& info, const Host& host)
      : kernels_(host.kernels),
        inputs_(info.number("width")),
        factor_(info.real("factor")),
        part_(part_of(info.text("format"), info.number("rows"), inputs_, info.constant(1))) {}

  void run(const Pass& pass) const {
    const Tensor ids = pass.input(0);
    require(ids.type == ort::kInt64, "tokens are not int64");
    const auto* tokens = static_cast<const int64_t*>(ids.data);
    for (int64_t i = 0; i < ids.size(); i++)
      require(tokens[i] >= 0 && tokens[i] < part_.columns, "a token is not in the vocabulary");
    std::vector<int64_t> shape = ids.shape;
    shape.push_back(inputs_);
    auto* y = pass.output<float>(0, shape);
    pass.spread(ids.size(), [&](int64_t i) { kernels_.gather(part_, inputs_, tokens[i], factor_, y + i * inputs_); });
  }

 private:
  const Kernels& kernels_;
  int64_t inputs_;
  float factor_;
  Part part_;
};

// NaN where a row has one, or where its largest is not finite.
class Choose {
 public:
  static constexpr const char* kName = "Choose";
  static constexpr std::array kInputs = {ort::kFloat};
  static constexpr std::array kCharacteristics = {ort::kRequired};
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
      likely[row] = 1.0f / total + (most - most);  // not a number where the largest is not finite
    }
  }

 private:
  static constexpr int64_t kChunk = 8192;  // not by threads: the order of sums is part of the answer

  const Kernels& kernels_;
};

}  // namespace edgespec
