// The operators of domain `edgespec`, for ONNX Runtime:
//
//     Linear     normalization, rounding of activations, products, bias, gate, residual
//     Attention  rotation, KV cache in place, attention
//     Embedding  rows of a matrix
//     Choose     the most likely column of each row, and its probability
//
// They run on the session's own threads. What a graph says is checked when its kernels are made, what a pass
// brings when it runs; nothing is read past the end of a tensor.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "ort.h"

namespace edgespec {
namespace {

using ort::Api;

// An OrtStatus on its way up.
struct Failure {
  OrtStatus* status;
};

// What makes a graph or a pass unusable, in words for whoever made it.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void check(OrtStatus* status) {
  if (status != nullptr) throw Failure{status};
}

void require(bool holds, const char* otherwise) {
  if (!holds) throw Refusal(otherwise);
}

struct Tensor {
  void* data = nullptr;
  int type = 0;
  std::vector<int64_t> shape;

  explicit operator bool() const { return data != nullptr; }
  const float* floats() const { return static_cast<const float*>(data); }
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t each : shape) n *= each;
    return n;
  }
  int64_t last() const { return shape.empty() ? 1 : shape.back(); }
};

Tensor read(const Api& api, const OrtValue* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api.type_and_shape(value, &info));
  const auto released = [&](OrtTensorTypeAndShapeInfo* each) { api.release_shape(each); };
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(released)> owner(info, released);
  size_t count = 0;
  check(api.dimension_count(info, &count));
  tensor.shape.resize(count);
  check(api.dimensions(info, tensor.shape.data(), count));
  check(api.element_type(info, &tensor.type));
  check(api.data(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

// What a kernel is made from.
class Info {
 public:
  Info(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int64_t number(const char* name) const {
    int64_t value = 0;
    check(api_.int_attribute(info_, name, &value));
    return value;
  }

  float real(const char* name) const {
    float value = 0;
    check(api_.float_attribute(info_, name, &value));
    return value;
  }

  std::string text(const char* name) const {
    size_t size = 0;
    check(api_.string_attribute(info_, name, nullptr, &size));
    std::string value(size, '\0');
    check(api_.string_attribute(info_, name, value.data(), &size));
    while (!value.empty() && value.back() == '\0') value.pop_back();
    return value;
  }

  size_t inputs() const {
    size_t count = 0;
    check(api_.info_input_count(info_, &count));
    return count;
  }

  Tensor constant(size_t index) const {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    check(api_.constant_input(info_, index, &is_constant, &value));
    require(is_constant != 0 && value != nullptr, "a weight is not a constant of the graph");
    return read(api_, value);
  }

 private:
  const Api& api_;
  const OrtKernelInfo* info_;
};

// What a pass brings.
class Pass {
 public:
  Pass(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  Tensor input(size_t index) const {
    const OrtValue* value = nullptr;
    check(api_.input(context_, index, &value));
    return read(api_, value);
  }

  // An input of float32 that may be absent, of `size` elements.
  const float* vector(size_t index, int64_t size, const char* otherwise) const {
    const Tensor tensor = input(index);
    require(!tensor || (tensor.type == ort::kFloat && tensor.size() == size), otherwise);
    return tensor.floats();
  }

  template <class T>
  T* output(size_t index, const std::vector<int64_t>& shape) const {
    OrtValue* value = nullptr;
    check(api_.output(context_, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    check(api_.data(value, &data));
    return static_cast<T*>(data);
  }

  // run(i) for i below `count`, on the session's threads. Waking them costs about as much as a little work.
  template <class Run>
  void spread(int64_t count, const Run& run) const {
    if (count == 1) return run(0);
    auto* data = const_cast<void*>(static_cast<const void*>(&run));
    const auto each = [](void* it, size_t i) { (*static_cast<const Run*>(it))(static_cast<int64_t>(i)); };
    if (count > 1) check(api_.parallel_for(context_, each, static_cast<size_t>(count), 0, data));
  }

 private:
  const Api& api_;
  OrtKernelContext* context_;
};

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(sizeof(T) * static_cast<size_t>(std::max<int64_t>(count, 1)),
                                             std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

constexpr int64_t kMost = int64_t{1} << 31;  // of any width, so that products of two fit 64 bits

Part part_of(std::string_view format, int64_t columns, int64_t inputs, const Tensor& weights) {
  require(columns > 0 && columns < kMost && inputs > 0 && inputs < kMost, "a matrix has impossible widths");
  for (int index = 0; index < kFormatCount; index++) {
    const FormatInfo& known = kFormats[index];
    if (format != known.name) continue;
    require(inputs % known.inputs == 0, "a matrix's inputs are no multiple of its format's block");
    const Part part{static_cast<const uint8_t*>(weights.data), columns, index};
    const bool fits = part.tile_count() * (inputs / known.inputs) * known.bytes == weights.size();
    require(weights.type == ort::kUint8 && fits, "a matrix has more or fewer bytes than its widths take");
    return part;
  }
  throw Refusal("no format of weights is called " + std::string(format));
}

// "Q4_K:1536,Q6_K:256" and a tensor for each, from input `first` on.
std::vector<Part> parts_of(const Info& info, std::string_view text, int64_t inputs, size_t first) {
  std::vector<Part> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t colon = std::min(item.find(':'), item.size());
    int64_t columns = 0;
    std::from_chars(item.data() + std::min(colon + 1, item.size()), item.data() + item.size(), columns);
    require(first < info.inputs(), "a projection has fewer matrices than parts");
    parts.push_back(part_of(item.substr(0, colon), columns, inputs, info.constant(first++)));
  }
  require(!parts.empty() && first == info.inputs(), "a projection has more matrices than parts");
  return parts;
}

Gate gate_of(const std::string& name) {
  if (name.empty()) return Gate::none;
  if (name == "silu") return Gate::silu;
  require(name == "gelu", "a gate is neither silu nor gelu");
  return Gate::gelu;
}

// y = [residual +] [norm of] gate(norm(x) W + bias)
class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat, ort::kFloat,
                                         ort::kFloat, ort::kFloat, ort::kUint8};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kOptional, ort::kOptional,
                                                  ort::kOptional, ort::kOptional, ort::kVariadic};
  static constexpr std::array kOutputs = {ort::kFloat};
  enum Input : size_t { kX, kGain, kBias, kPostGain, kResidual, kWeights };

  Linear(const Info& info, const Kernels& kernels)
      : kernels_(kernels),
        inputs_(info.number("inputs")),
        epsilon_(info.real("epsilon")),
        gate_(gate_of(info.text("gate"))),
        parts_(parts_of(info, info.text("parts"), inputs_, kWeights)) {
    const size_t half = parts_.size() / 2;
    if (gate_ != Gate::none) {
      require(parts_.size() % 2 == 0, "a gated projection has an odd number of parts");
      for (size_t i = 0; i < half; i++)
        require(parts_[i].columns == parts_[half + i].columns, "a gate is not as wide as what it multiplies");
    }
    int64_t bytes = 0;
    for (size_t i = 0; i < (gate_ == Gate::none ? parts_.size() : half); i++) {
      width_ += parts_[i].columns;
      tiles_ += parts_[i].tile_count();
      const FormatInfo& format = kFormats[parts_[i].format];
      bytes += parts_[i].tile_count() * (inputs_ / format.inputs) * format.bytes;
    }
    // Enough work for a thread to be worth waking, and enough pieces for threads of uneven speed.
    chunks_ = std::clamp<int64_t>(bytes / kChunkBytes, 1, std::min<int64_t>(kChunks, tiles_));
  }

  void run(const Pass& pass) const {
    const Tensor x = pass.input(kX);
    require(x.type == ort::kFloat && x.shape.size() == 3 && x.last() == inputs_,
            "a projection's input is not float32 (1, rows, inputs)");
    const int64_t rows = x.size() / inputs_;
    const float* gain = pass.vector(kGain, inputs_, "a normalization's gain is not as wide as its input");
    Projection p{};
    p.parts = parts_.data();
    p.part_count = static_cast<int64_t>(parts_.size());
    p.inputs = inputs_;
    p.gate = gate_;
    p.width = width_;
    p.rows = rows;
    p.bias = pass.vector(kBias, width_, "a bias is not as wide as its projection");
    const float* post_gain = pass.vector(kPostGain, width_, "a gain is not as wide as its projection");
    const float* residual = pass.vector(kResidual, rows * width_, "a residual is not shaped as its projection");
    p.y = pass.output<float>(0, {x.shape[0], x.shape[1], width_});
    if (rows == 0) return;
    p.residual = post_gain == nullptr ? residual : nullptr;
    const Buffer<Activations> activations(rows * (inputs_ / kBlock));
    p.activations = activations.get();
    round(pass, x.floats(), gain, rows, activations.get());
    pass.spread(chunks_, [&](int64_t i) {
      kernels_.project(p, tiles_ * i / chunks_, tiles_ * (i + 1) / chunks_);
    });
    if (post_gain != nullptr) add_normalized(pass, p, post_gain, residual);
  }

 private:
  static constexpr int64_t kChunkBytes = 48 << 10, kChunks = 32, kFewRows = 4;

  void round(const Pass& pass, const float* x, const float* gain, int64_t rows, Activations* y) const {
    const auto row = [&](int64_t r, float* normed) {
      const float* from = x + r * inputs_;
      if (gain != nullptr) {
        kernels_.normalize(from, gain, epsilon_, inputs_, normed);
        from = normed;
      }
      kernels_.quantize(from, inputs_, y + r * (inputs_ / kBlock));
    };
    if (rows <= kFewRows) {
      const Buffer<float> normed(gain != nullptr ? inputs_ : 0);
      for (int64_t r = 0; r < rows; r++) row(r, normed.get());
      return;
    }
    pass.spread((rows + kFewRows - 1) / kFewRows, [&](int64_t i) {
      const Buffer<float> normed(gain != nullptr ? inputs_ : 0);
      for (int64_t r = i * kFewRows; r < std::min(rows, (i + 1) * kFewRows); r++) row(r, normed.get());
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
  int64_t inputs_;
  float epsilon_;
  Gate gate_;
  std::vector<Part> parts_;
  int64_t width_ = 0, tiles_ = 0, chunks_ = 1;
};

// Keys lie in tiles of 16 tokens, channel by channel, so that a lane is a token; values lie row by row.
class Attention {
 public:
  static constexpr const char* kName = "Attention";
  static constexpr std::array kInputs = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kInt64,
                                         ort::kFloat, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kRequired, ort::kRequired,
                                                  ort::kRequired, ort::kOptional, ort::kOptional,
                                                  ort::kOptional, ort::kOptional};
  static constexpr std::array kOutputs = {ort::kFloat, ort::kFloat, ort::kFloat};
  enum Input : size_t { kPacked, kPastKey, kPastValue, kPastLength, kCos, kSin, kQueryGain, kKeyGain };

  Attention(const Info& info, const Kernels& kernels)
      : kernels_(kernels),
        heads_(info.number("heads")),
        kv_heads_(info.number("kv_heads")),
        head_dim_(info.number("head_dim")),
        window_(info.number("window")),
        interleaved_(info.number("interleaved") != 0),
        scale_(info.real("scale")),
        epsilon_(info.real("epsilon")) {
    const bool sound = heads_ > 0 && kv_heads_ > 0 && heads_ < kMost && heads_ % kv_heads_ == 0;
    require(sound, "attention heads are no multiple of heads of keys and values");
    require(head_dim_ > 0 && head_dim_ < kMost, "a head has an impossible width");
    require(window_ >= 0, "an attention window is negative");
  }

  void run(const Pass& pass) const {
    const Tensor packed = pass.input(kPacked);
    const int64_t width = (heads_ + 2 * kv_heads_) * head_dim_;
    require(packed.type == ort::kFloat && packed.shape.size() == 3 && packed.last() == width,
            "attention's input is not float32 (1, rows, heads and twice the heads of keys)");
    State s{};
    s.packed = packed.floats();
    s.rows = packed.size() / width;
    s.width = width;
    const Tensor length = pass.input(kPastLength);
    require(length.type == ort::kInt64 && length.size() == 1, "attention's past length is no int64 (1)");
    s.past = *static_cast<const int64_t*>(length.data);
    cache(pass, s);
    rotation(pass, s);
    s.query_gain = pass.vector(kQueryGain, head_dim_, "a gain is not as wide as a head");
    s.key_gain = pass.vector(kKeyGain, head_dim_, "a gain is not as wide as a head");
    s.y = pass.output<float>(0, {packed.shape[0], packed.shape[1], heads_ * head_dim_});
    if (s.rows == 0) return;
    if (s.rows <= kFewRows)
      for (int64_t head = 0; head < kv_heads_; head++) append(s, head);
    else
      pass.spread(kv_heads_, [&](int64_t head) { append(s, head); });
    const int64_t groups = (s.rows + kAttentionRows - 1) / kAttentionRows;
    pass.spread(heads_ * groups, [&](int64_t i) {
      const int64_t group = i / heads_;
      attend(s, i % heads_, s.rows * group / groups, s.rows * (group + 1) / groups);
    });
  }

 private:
  static constexpr int64_t kFewRows = 8;

  struct State {
    const float* packed;
    int64_t rows, width, past, capacity, rotated;  // rotated: channels of a head
    const float *cos, *sin, *query_gain, *key_gain;
    float *keys, *values, *y;
  };

  // The cache, in place where the pass binds one buffer for what was and what is.
  void cache(const Pass& pass, State& s) const {
    float* const* const present[] = {&s.keys, &s.values};
    for (size_t i = 0; i < 2; i++) {
      const Tensor past = pass.input(kPastKey + i);
      const bool shaped = past.type == ort::kFloat && past.shape.size() == 4 && past.shape[0] == 1 &&
                          past.shape[1] == kv_heads_ && past.shape[3] == head_dim_;
      require(shaped, "a KV cache is not float32 (1, heads, capacity, head width)");
      require(i == 0 || past.shape[2] == s.capacity, "keys and values have caches of different length");
      s.capacity = past.shape[2];
      require(s.capacity % kLanes == 0, "a KV cache's capacity is no multiple of 16");
      require(s.past >= 0 && s.past <= s.capacity && s.rows <= s.capacity - s.past,
              "a pass has more tokens than its KV cache has room for");
      float* now = pass.output<float>(1 + i, past.shape);
      if (now != past.data && past.size() > 0)
        std::memcpy(now, past.data, sizeof(float) * static_cast<size_t>(past.size()));
      *const_cast<float**>(present[i]) = now;
    }
  }

  void rotation(const Pass& pass, State& s) const {
    const Tensor cos = pass.input(kCos), sin = pass.input(kSin);
    if (!cos && !sin) return;
    const bool shaped = cos && sin && cos.type == ort::kFloat && sin.type == ort::kFloat &&
                        cos.shape.size() == 2 && cos.shape == sin.shape && 2 * cos.last() <= head_dim_;
    require(shaped, "rotary tables are not float32 (positions, half the rotated channels)");
    require(s.past + s.rows <= cos.shape[0], "a pass goes beyond the rotary tables");
    s.cos = cos.floats();
    s.sin = sin.floats();
    s.rotated = 2 * cos.last();
  }

  // A head's channels of a row: normalized, rotated, times `factor`.
  void prepare(const State& s, const float* x, const float* gain, int64_t row, float factor, float* y) const {
    if (gain != nullptr)
      kernels_.normalize(x, gain, epsilon_, head_dim_, y);
    else
      std::copy(x, x + head_dim_, y);
    const int64_t half = s.rotated / 2;
    const float *cos = s.cos + (s.past + row) * half, *sin = s.sin + (s.past + row) * half;
    for (int64_t i = 0; i < half; i++) {
      const int64_t a = interleaved_ ? 2 * i : i, b = interleaved_ ? 2 * i + 1 : half + i;
      const float first = y[a], second = y[b];
      y[a] = first * cos[i] - second * sin[i];
      y[b] = second * cos[i] + first * sin[i];
    }
    if (factor != 1.0f)
      for (int64_t i = 0; i < head_dim_; i++) y[i] = y[i] * factor;
  }

  void append(const State& s, int64_t head) const {
    const Buffer<float> key(head_dim_);
    float* keys = s.keys + head * s.capacity * head_dim_;
    float* values = s.values + head * s.capacity * head_dim_;
    for (int64_t row = 0; row < s.rows; row++) {
      const float* x = s.packed + row * s.width + (heads_ + head) * head_dim_;
      prepare(s, x, s.key_gain, row, 1.0f, key.get());
      const int64_t at = s.past + row;
      float* lane = keys + at / kLanes * kLanes * head_dim_ + at % kLanes;
      for (int64_t d = 0; d < head_dim_; d++) lane[d * kLanes] = key.get()[d];
      const float* value = x + kv_heads_ * head_dim_;
      std::copy(value, value + head_dim_, values + at * head_dim_);
    }
  }

  void attend(const State& s, int64_t head, int64_t first, int64_t last) const {
    const int64_t rows = last - first, kv_head = head / (heads_ / kv_heads_);
    const Buffer<float> queries(rows * head_dim_);
    for (int64_t row = first; row < last; row++)
      prepare(s, s.packed + row * s.width + head * head_dim_, s.query_gain, row, scale_,
              queries.get() + (row - first) * head_dim_);
    const Buffer<float> scratch(attention_scratch(s.past + last));
    HeadAttention h{};
    h.queries = queries.get();
    h.keys = s.keys + kv_head * s.capacity * head_dim_;
    h.values = s.values + kv_head * s.capacity * head_dim_;
    h.head_dim = head_dim_;
    h.past = s.past + first;
    h.rows = rows;
    h.window = window_;
    h.scratch = scratch.get();
    h.stride = heads_ * head_dim_;
    h.y = s.y + first * h.stride + head * head_dim_;
    kernels_.attend(h);
  }

  const Kernels& kernels_;
  int64_t heads_, kv_heads_, head_dim_, window_;
  bool interleaved_;
  float scale_, epsilon_;
};

class Embedding {
 public:
  static constexpr const char* kName = "Embedding";
  static constexpr std::array kInputs = {ort::kInt64, ort::kUint8};
  static constexpr std::array kCharacteristics = {ort::kRequired, ort::kRequired};
  static constexpr std::array kOutputs = {ort::kFloat};

  Embedding(const Info& info, const Kernels& kernels)
      : kernels_(kernels),
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

  Choose(const Info&, const Kernels& kernels) : kernels_(kernels) {}

  void run(const Pass& pass) const {
    const Tensor logits = pass.input(0);
    require(logits.type == ort::kFloat && logits.shape.size() == 3 && logits.last() > 0,
            "logits are not float32 (1, rows, columns)");
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

// An operator as ONNX Runtime sees it, over one table of kernels.
template <class Operator>
class Registered : public ort::CustomOp {
 public:
  Registered(const Api& api, const Kernels& kernels) : ort::CustomOp{}, api_(api), kernels_(kernels) {
    version = ort::kVersion;
    get_name = [](const CustomOp*) { return Operator::kName; };
    get_provider = [](const CustomOp*) -> const char* { return nullptr; };
    get_input_type = [](const CustomOp*, size_t i) -> int { return Operator::kInputs[i]; };
    get_input_count = [](const CustomOp*) { return Operator::kInputs.size(); };
    get_output_type = [](const CustomOp*, size_t i) -> int { return Operator::kOutputs[i]; };
    get_output_count = [](const CustomOp*) { return Operator::kOutputs.size(); };
    get_input_characteristic = [](const CustomOp*, size_t i) -> int { return Operator::kCharacteristics[i]; };
    get_output_characteristic = [](const CustomOp*, size_t) -> int { return ort::kRequired; };
    get_input_memory = [](const CustomOp*, size_t) { return 0; };
    get_variadic_input_least = get_variadic_output_least = [](const CustomOp*) { return 1; };
    get_variadic_input_alike = get_variadic_output_alike = [](const CustomOp*) { return 1; };
    create_kernel_v2 = create;
    compute_v2 = [](void* kernel, OrtKernelContext* context) {
      const auto* made = static_cast<const Made*>(kernel);
      return guarded(made->api, [&] { made->op.run(Pass(made->api, context)); });
    };
    destroy = [](void* kernel) { delete static_cast<Made*>(kernel); };
  }

 private:
  struct Made {
    const Api& api;
    Operator op;
  };

  static OrtStatus* create(const CustomOp* op, const void*, const OrtKernelInfo* info, void** out) {
    const auto* self = static_cast<const Registered*>(op);
    return guarded(self->api_, [&] {
      *out = new Made{self->api_, Operator(Info(self->api_, info), self->kernels_)};
    });
  }

  template <class Run>
  static OrtStatus* guarded(const Api& api, const Run& run) {
    try {
      run();
      return nullptr;
    } catch (const Failure& failure) {
      return failure.status;
    } catch (const std::bad_alloc&) {
      return api.create_status(ort::kFailure, "edgespec: not enough memory");
    } catch (const std::exception& error) {
      return api.create_status(ort::kInvalidArgument, (std::string("edgespec: ") + error.what()).c_str());
    }
  }

  const Api& api_;
  const Kernels& kernels_;
};

// The operators over one table. Sessions refer to it for as long as they live, so it is never freed.
struct Domain {
  Domain(const void* const* table, const Kernels& kernels)
      : api(table), linear(api, kernels), attention(api, kernels), embedding(api, kernels), choose(api, kernels) {
    check(api.create_domain("edgespec", &domain));
    for (const ort::CustomOp* op : std::initializer_list<const ort::CustomOp*>{&linear, &attention, &embedding, &choose})
      check(api.add_operator(domain, op));
  }

  Api api;
  Registered<Linear> linear;
  Registered<Attention> attention;
  Registered<Embedding> embedding;
  Registered<Choose> choose;
  OrtCustomOpDomain* domain = nullptr;
};

std::string setting(const Api& api, OrtSessionOptions* options, const char* key) {
  int found = 0;
  check(api.has_setting(options, key, &found));
  if (found == 0) return {};
  size_t size = 0;
  check(api.setting(options, key, nullptr, &size));
  std::string value(size, '\0');
  check(api.setting(options, key, value.data(), &size));
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

}  // namespace
}  // namespace edgespec

#if defined(_WIN32)
#define EDGESPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGESPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Called by ONNX Runtime. The session option `edgespec.instructions` names the set to use instead of the best.
EDGESPEC_EXPORT OrtStatus* EDGESPEC_ORT_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                               const edgespec::ort::ApiBase* base) {
  using namespace edgespec;
  const void* const* table = base->get_api(ort::kVersion);
  if (table == nullptr) return nullptr;  // too old to say so: sessions will not know the operators
  const Api api(table);
  try {
    const std::string name = setting(api, options, "edgespec.instructions");
    const Kernels* kernels = find_kernels(name.c_str());
    if (kernels == nullptr)
      return api.create_status(ort::kInvalidArgument,
                               ("edgespec: this processor has no instructions called " + name).c_str());
    auto domain = std::make_unique<Domain>(table, *kernels);
    check(api.add_domain(options, domain->domain));
    domain.release();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return api.create_status(ort::kFailure, error.what());
  }
}

// The best set of instructions that this processor has; for reports.
EDGESPEC_EXPORT const char* edgespec_instructions() { return edgespec::find_kernels("")->name; }
