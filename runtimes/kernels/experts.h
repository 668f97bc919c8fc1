// Mixtures of experts: a router chooses a few MLPs for each row.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "linear.h"

namespace edgespec {

// y = [residual +] [norm of] ([norm of] the sum over a row's experts, the best first, of
//     weight * down(gate(norm(x)) * up(norm(x))), or down(squared(up(norm(x)))) [+ shared, or sigmoid(the router's last score) * shared])
//
// The router reads the experts' input, or x through its own normalization. It chooses experts by scores in float32,
// which are summed in a fixed order; of equal scores the first is better. Rows are grouped by expert, so that an
// expert's tiles are unpacked once for all its rows. A row's results are added in the order of its choices, so its
// bits do not depend on the other rows. The second output is the number of different experts of the rows.
class Experts {
 public:
  static constexpr const char* kName = "Experts";
  static constexpr ort::Inputs kInputs{{
      {"x", ort::kFloat}, {"gain", ort::kFloat, ort::kOptional}, {"residual", ort::kFloat, ort::kOptional},
      {"shared", ort::kFloat, ort::kOptional}, {"router", ort::kFloat}, {"router_bias", ort::kFloat, ort::kOptional},
      {"bias", ort::kFloat, ort::kOptional}, {"down_bias", ort::kFloat, ort::kOptional},
      {"selection", ort::kFloat, ort::kOptional}, {"gate", ort::kUint8, ort::kOptional}, {"up", ort::kUint8}, {"down", ort::kUint8},
      {"router_gain", ort::kFloat, ort::kOptional}, {"scales", ort::kFloat, ort::kOptional},
      {"post_gain", ort::kFloat, ort::kOptional}, {"sum_gain", ort::kFloat, ort::kOptional}}};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kInt64};

  Experts(const Info& info, const Host& host)
      : kernels_(host.kernels),
        pages_(host.pages()),
        inputs_(info.number("inputs")),
        width_(info.number("width")),
        experts_(info.number("experts")),
        used_(info.number("used")),
        epsilon_(info.real("epsilon")),
        scale_(info.real("scale")),
        normalized_(info.number("normalized") != 0),
        gate_(gate_of(info.text("gate"))) {
    const std::string gating = info.text("gating");
    sigmoid_ = gating == "sigmoid";
    require(sigmoid_ || gating == "softmax", "experts are weighed by neither softmax nor sigmoid");
    require(gate_ != Gate::none && gate_ != Gate::xielu, "experts have no gate, or xielu");
    require(used_ > 0 && used_ <= experts_ && experts_ <= kMostExperts, "a row uses an impossible number of experts");
    for (const int64_t width : {inputs_, width_})
      require(width > 0 && width < kMost / experts_ && width % kLanes == 0, "experts have impossible widths");
    const std::string text = info.text("formats");
    std::string_view formats = text;
    for (size_t i = first(); i < matrices_.size(); i++) {
      const size_t end = std::min(formats.find(','), formats.size());
      const bool down = i == kDown;
      Part part = part_of(formats.substr(0, end), experts_ * (down ? inputs_ : width_), down ? width_ : inputs_,
                          info.constant(kInputs["gate"] + i));
      formats.remove_prefix(std::min(end + 1, formats.size()));
      const size_t bytes = part.bytes(down ? width_ : inputs_);
      if (pages_ != nullptr && pages_->all()) part.tiles = pages_->copy(part.tiles, bytes);
      if (pages_ != nullptr && !pages_->all()) Mapped{part.tiles, bytes}.scattered();
      matrices_[i] = {part, static_cast<int64_t>(bytes) / experts_};
    }
    const Tensor router = info.constant(kInputs["router"]);
    scored_ = router.shape.empty() ? 0 : router.shape[0];
    require(router.shape.size() == 2 && router.last() == inputs_ && (scored_ == experts_ || scored_ == experts_ + 1),
            "a router is not float32 (experts, perhaps one more, inputs)");
    router_ = router.floats();
    const std::shared_ptr<Crew> crew = host.crew();
    Weights weights;
    weights.starts.resize(static_cast<size_t>(crew->threads()));
    for (int64_t t = 0; t < std::min(crew->threads(), groups()); t++)
      weights.starts[static_cast<size_t>(t)] = {
          reinterpret_cast<const uint8_t*>(router_ + crew->first(groups(), t) * kScored * inputs_), nullptr};
    weights_ = crew->follow(std::move(weights));
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kInputs["x"]);
    require(x.shape.size() == 3 && x.last() == inputs_, "the input of experts is not float32 (1, rows, inputs)");
    const int64_t rows = x.size() / inputs_;
    Routed routed{};
    routed.rows = rows;
    constexpr const char* gain_of = "a normalization's gain is not as wide as its input";
    routed.gain = pass.vector(kInputs["gain"], inputs_, gain_of);
    routed.own_gain = pass.vector(kInputs["router_gain"], inputs_, gain_of);
    const float* post_gain = pass.vector(kInputs["post_gain"], inputs_, gain_of);
    const float* sum_gain = pass.vector(kInputs["sum_gain"], inputs_, gain_of);
    constexpr const char* router_bias = "a router has another number of biases than experts";
    routed.bias = pass.vector(kInputs["router_bias"], experts_, router_bias);
    routed.selection = pass.vector(kInputs["selection"], experts_, router_bias);
    routed.scales = pass.vector(kInputs["scales"], experts_, "there is another number of scales than experts");
    const auto inner_parts = static_cast<int64_t>(kDown - first());
    constexpr const char* expert_bias = "biases of experts are not as wide as they";
    const float* bias = pass.vector(kInputs["bias"], inner_parts * experts_ * width_, expert_bias);
    const float* down_bias = pass.vector(kInputs["down_bias"], experts_ * inputs_, expert_bias);
    const float* residual = pass.vector(kInputs["residual"], rows * inputs_, "a residual is not shaped as the experts");
    const float* shared = pass.vector(kInputs["shared"], rows * inputs_, "a shared expert is not shaped as the others");
    const bool has_score = scored_ > experts_;
    require(shared != nullptr || !has_score || rows == 0, "a shared expert's score has no expert");
    float* y = pass.output<float>(0, {x.shape[0], x.shape[1], inputs_});
    int64_t* different = pass.output<int64_t>(1, {1});
    *different = 0;
    if (rows == 0) return;
    const int64_t pairs = rows * used_;
    const Buffer<float> normed(rows * inputs_), scores(rows * scored_), shared_weights(rows);
    const Buffer<Choice> choices(pairs);
    score(pass, x.floats(), routed, normed.get(), scores.get());
    by_rows(pass, rows, experts_, [&](int64_t r) {
      choose(routed, scores.get() + r * scored_, choices.get() + r * used_, shared_weights.get() + r);
    });
    const std::vector<Group> groups = grouped(choices.get(), pairs);
    *different = static_cast<int64_t>(groups.size());
    if (pages_ != nullptr && !pages_->all())  // they stay in their file: ask for all before reading the first
      pass.spread((inner_parts + 1) * *different, [&](int64_t i) {
        const Matrix& stored = matrices_[first() + static_cast<size_t>(i / *different)];
        const int64_t expert = groups[static_cast<size_t>(i % *different)].expert;
        Mapped{stored.part.tiles + expert * stored.plane, static_cast<size_t>(stored.plane)}.ask();
      });

    const Buffer<Activations> activations(pairs * (inputs_ / kBlock));
    const Buffer<float> factors(pairs), inner(pairs * width_), results(pairs * inputs_);
    by_rows(pass, rows, inputs_, [&](int64_t r) {
      round(normed.get() + r * inputs_, choices.get() + r * used_, groups, activations.get(), factors.get());
    });
    std::vector<std::array<Part, 2>> parts(groups.size());
    std::vector<Projection> projections(groups.size());
    for (size_t i = 0; i < groups.size(); i++) {
      const Group& group = groups[i];
      parts[i] = {part(first(), group.expert, width_), part(kUp, group.expert, width_)};
      Projection& p = projections[i] = projection(group, parts[i].data(), inner_parts, inputs_, width_);
      p.gate = gate_;
      p.activations = activations.get() + group.first * (inputs_ / kBlock);
      p.factors = factors.get() + group.first;
      if (bias != nullptr) p.bias = bias + group.expert * width_;
      if (bias != nullptr && has_factor(gate_)) p.other_bias = p.bias + experts_ * width_;
      p.y = inner.get() + group.first * width_;
    }
    multiply(pass, projections, inner_parts * bytes_of(kUp), nullptr);

    const Buffer<Activations> inner_activations(pairs * (width_ / kBlock));
    pass.spread(pieces_of(pairs, width_), [&](int64_t i) {
      const int64_t pieces = pieces_of(pairs, width_), last = pairs * (i + 1) / pieces;
      auto group = std::upper_bound(groups.begin(), groups.end(), pairs * i / pieces,
                                    [](int64_t pair, const Group& next) { return pair < next.first; }) - 1;
      for (int64_t pair = pairs * i / pieces; pair < last; pair++) {
        if (pair == group->first + group->rows) ++group;
        Activations* to = inner_activations.get() + group->first * (width_ / kBlock) + pair - group->first;
        factors.get()[pair] = kernels_.quantize(inner.get() + pair * width_, width_, to, group->rows);
      }
    });
    for (size_t i = 0; i < groups.size(); i++) {
      const Group& group = groups[i];
      parts[i][0] = part(kDown, group.expert, inputs_);
      Projection& p = projections[i] = projection(group, parts[i].data(), 1, width_, inputs_);
      p.activations = inner_activations.get() + group.first * (width_ / kBlock);
      p.factors = factors.get() + group.first;
      if (down_bias != nullptr) p.bias = down_bias + group.expert * inputs_;
      p.y = results.get() + group.first * inputs_;
    }
    multiply(pass, projections, bytes_of(kDown), weights_);
    by_rows(pass, rows, inputs_ * used_, [&](int64_t r) {
      const Choice* own = choices.get() + r * used_;
      float* to = y + r * inputs_;
      weigh(results.get() + own[0].place * inputs_, own[0].weight, to, false);
      for (int64_t i = 1; i < used_; i++) weigh(results.get() + own[i].place * inputs_, own[i].weight, to, true);
      if (post_gain != nullptr) kernels_.normalize(to, post_gain, epsilon_, inputs_, to);
      if (shared != nullptr) weigh(shared + r * inputs_, has_score ? shared_weights.get()[r] : 1.0f, to, true);
      if (sum_gain != nullptr) kernels_.normalize(to, sum_gain, epsilon_, inputs_, to);
      if (residual != nullptr)
        for (int64_t c = 0; c < inputs_; c++) to[c] = residual[r * inputs_ + c] + to[c];
    });
  }

 private:
  static constexpr size_t kGate = 0, kUp = 1, kDown = 2;  // of an expert's matrices
  static constexpr int64_t kMostExperts = 1 << 12, kScored = 16, kSome = 1 << 10;
  static constexpr int64_t kChunkBytes = 48 << 10, kChunks = 128;
  static constexpr float kLeastSum = 0x1p-14f;

  // The router's inputs.
  struct Routed {
    int64_t rows;
    const float *gain, *own_gain, *bias, *selection, *scales;
  };
  // An expert of a row, and the place of the row's result.
  struct Choice {
    int64_t expert, place;
    float weight;
  };
  // The rows of an expert.
  struct Group {
    int64_t expert, first, rows;
  };
  struct Matrix {
    Part part;
    int64_t plane;  // bytes of one expert
  };

  size_t first() const { return has_factor(gate_) ? kGate : kUp; }
  int64_t groups() const { return (scored_ + kScored - 1) / kScored; }
  int64_t bytes_of(size_t matrix) const { return matrices_[matrix].plane; }
  Part part(size_t matrix, int64_t expert, int64_t columns) const {
    const Matrix& known = matrices_[matrix];
    return {known.part.tiles + expert * known.plane, columns, known.part.format};
  }

  static int64_t pieces_of(int64_t rows, int64_t width) { return std::clamp<int64_t>(rows * width / kSome, 1, rows); }

  template <class Run>
  static void by_rows(const Pass& pass, int64_t rows, int64_t width, const Run& run) {
    const int64_t pieces = pieces_of(rows, width);
    pass.spread(pieces, [&](int64_t i) {
      for (int64_t r = rows * i / pieces; r < rows * (i + 1) / pieces; r++) run(r);
    });
  }

  void score(const Pass& pass, const float* x, const Routed& routed, float* normed, float* scores) const {
    const Buffer<float> own(routed.own_gain != nullptr ? routed.rows * inputs_ : 0);
    by_rows(pass, routed.rows, inputs_, [&](int64_t r) {
      const float* from = x + r * inputs_;
      if (routed.gain != nullptr)
        kernels_.normalize(from, routed.gain, epsilon_, inputs_, normed + r * inputs_);
      else
        std::copy_n(from, inputs_, normed + r * inputs_);
      if (routed.own_gain != nullptr)
        kernels_.normalize(from, routed.own_gain, epsilon_, inputs_, own.get() + r * inputs_);
    });
    const float* read = routed.own_gain != nullptr ? own.get() : normed;
    pass.spread(groups(), [&](int64_t i) {
      const int64_t first = i * kScored, count = std::min(kScored, scored_ - first);
      kernels_.dots(read, routed.rows, router_ + first * inputs_, count, inputs_, scores + first, scored_);
    });
  }

  // Chooses a row's experts, the best first, and computes the weight of the shared expert.
  void choose(const Routed& routed, float* scores, Choice* choices, float* share) const {
    if (scored_ > experts_) {
      *share = 1.0f;
      kernels_.multiply(Gate::sigmoid, scores + experts_, 1, share);
    }
    if (routed.bias != nullptr)
      for (int64_t e = 0; e < experts_; e++) scores[e] = scores[e] + routed.bias[e];
    // Weights of all experts; without them, softmax over the scores of the chosen ones says as much.
    const bool all = sigmoid_ || routed.selection != nullptr;
    const Buffer<float> keys(experts_), weights(all ? experts_ : 0);
    if (sigmoid_) {
      std::fill_n(weights.get(), experts_, 1.0f);
      kernels_.multiply(Gate::sigmoid, scores, experts_, weights.get());
    } else if (all) {
      float top;
      int64_t at;
      kernels_.largest(scores, experts_, &top, &at);
      const float total = kernels_.sum_exp(scores, experts_, top);
      for (int64_t e = 0; e < experts_; e++) weights.get()[e] = kernels_.sum_exp(scores + e, 1, top) / total;
    }
    const float* worth = all ? weights.get() : scores;
    for (int64_t e = 0; e < experts_; e++)
      keys.get()[e] = routed.selection == nullptr ? worth[e] : worth[e] + routed.selection[e];
    float most = 0.0f, sum = 0.0f;
    for (int64_t i = 0; i < used_; i++) {
      Choice& choice = choices[i];
      float key;
      kernels_.largest(keys.get(), experts_, &key, &choice.expert);
      keys.get()[choice.expert] = -__builtin_inff();
      if (i == 0) most = worth[choice.expert];
      choice.weight = all ? worth[choice.expert] : kernels_.sum_exp(worth + choice.expert, 1, most);
      sum = sum + choice.weight;
    }
    if (!normalized_) sum = all ? 1.0f : kernels_.sum_exp(scores, experts_, most);
    sum = sum < kLeastSum ? kLeastSum : sum;
    for (int64_t i = 0; i < used_; i++) {
      choices[i].weight = choices[i].weight / sum * scale_;
      if (routed.scales != nullptr) choices[i].weight = choices[i].weight * routed.scales[choices[i].expert];
    }
  }

  // Finds a place for every choice. The rows of an expert lie together, and keep their order.
  std::vector<Group> grouped(Choice* choices, int64_t pairs) const {
    std::vector<int64_t> counts(static_cast<size_t>(experts_));
    for (int64_t i = 0; i < pairs; i++) counts[static_cast<size_t>(choices[i].expert)]++;
    std::vector<Group> groups;
    int64_t first = 0;
    for (int64_t e = 0; e < experts_; e++) {
      int64_t& count = counts[static_cast<size_t>(e)];
      if (count > 0) groups.push_back({e, first, count});
      first += count;
      count = first - count;
    }
    for (int64_t i = 0; i < pairs; i++) choices[i].place = counts[static_cast<size_t>(choices[i].expert)]++;
    return groups;
  }

  // Quantizes a row, and writes it beside the other rows of its experts.
  void round(const float* normed, const Choice* choices, const std::vector<Group>& groups, Activations* to,
             float* factors) const {
    const int64_t blocks = inputs_ / kBlock;
    const Activations* done = nullptr;
    int64_t step = 0;
    for (int64_t i = 0; i < used_; i++) {
      const int64_t place = choices[i].place;
      const auto group = std::upper_bound(groups.begin(), groups.end(), place,
                                          [](int64_t at, const Group& next) { return at < next.first; }) - 1;
      Activations* own = to + group->first * blocks + place - group->first;
      if (done == nullptr)
        factors[place] = kernels_.quantize(normed, inputs_, own, group->rows);
      else
        for (int64_t b = 0; b < blocks; b++) own[b * group->rows] = done[b * step];
      factors[place] = factors[choices[0].place];
      if (done == nullptr) done = own, step = group->rows;
    }
  }

  static Projection projection(const Group& group, const Part* parts, int64_t count, int64_t inputs, int64_t width) {
    Projection p{};
    p.parts = parts;
    p.part_count = count;
    p.inputs = inputs;
    p.width = width;
    p.rows = p.stride = group.rows;
    return p;
  }

  // Multiplies all tiles of all groups; a group reads `bytes`.
  void multiply(const Pass& pass, const std::vector<Projection>& all, int64_t bytes, const Weights* weights) const {
    const int64_t tiles = all[0].parts[0].tile_count(), total = tiles * static_cast<int64_t>(all.size());
    const int64_t chunks = std::clamp<int64_t>(bytes * static_cast<int64_t>(all.size()) / kChunkBytes, 1,
                                               std::min<int64_t>(kChunks, total));
    const auto piece = [&](int64_t i) {
      for (int64_t tile = total * i / chunks, last = total * (i + 1) / chunks; tile < last;) {
        const int64_t at = tile / tiles, end = std::min(last, (at + 1) * tiles);
        kernels_.project(all[static_cast<size_t>(at)], tile - at * tiles, end - at * tiles);
        tile = end;
      }
    };
    pass.spread(chunks, piece, weights);
  }

  void weigh(const float* x, float weight, float* y, bool added) const {
    if (added)
      for (int64_t c = 0; c < inputs_; c++) y[c] = y[c] + x[c] * weight;
    else
      for (int64_t c = 0; c < inputs_; c++) y[c] = x[c] * weight;
  }

  const Kernels& kernels_;
  std::shared_ptr<Pages> pages_;
  int64_t inputs_, width_, experts_, used_;
  float epsilon_, scale_;
  bool normalized_, sigmoid_ = false;
  Gate gate_;
  std::array<Matrix, 3> matrices_{};
  const float* router_ = nullptr;
  int64_t scored_ = 0;
  const Weights* weights_ = nullptr;
};

}  // namespace edgespec
