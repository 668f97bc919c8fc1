// ONNX Runtime for operators: the inputs of a kernel and of a pass, and errors.
#pragma once

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstddef>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "crew.h"
#include "kernels.h"
#include "ort.h"
#include "pages.h"

namespace edgespec {

using ort::Api;

// An OrtStatus as an exception.
struct Failure {
  OrtStatus* status;
};

// An unusable graph or pass, with a message for its author.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(OrtStatus* status) {
  if (status != nullptr) throw Failure{status};
}

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw Refusal(otherwise);
}

// A text of ONNX Runtime's, which returns its size if there is no place for it.
template <class Ask>
std::string text_of(const Ask& ask) {
  size_t size = 0;
  check(ask(nullptr, &size));
  std::string value(size, '\0');
  check(ask(value.data(), &size));
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

// A tensor's dimensions: a view of ONNX Runtime's, or of a list in the same expression.
struct Shape : std::span<const int64_t> {
  using span::span;
  Shape(std::initializer_list<int64_t> list) : span(list.begin(), list.size()) {}
  bool operator==(const Shape& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
};

struct Tensor {
  bool present = false;  // an empty tensor may have no data
  void* data = nullptr;
  Shape shape;

  explicit operator bool() const { return present; }
  const float* floats() const { return static_cast<const float*>(data); }
  int64_t size() const {
    int64_t n = 1;
    for (const int64_t dimension : shape) n *= dimension;
    return n;
  }
  int64_t last() const { return shape.empty() ? 1 : shape.back(); }
};

// The tensor of an input, which has its type; only an optional input may be absent.
inline Tensor read(const Api& api, const OrtValue* value, const ort::Input& input) {
  Tensor tensor;
  require(value != nullptr || input.presence == ort::kOptional, "a node lacks an input");
  if (value == nullptr) return tensor;
  tensor.present = true;
  int type = 0;
  const int64_t* dimensions = nullptr;
  size_t count = 0;
  check(api.type_and_shape(value, &type, &dimensions, &count));
  require(type == input.type, "an input is of another type than its operator takes");
  tensor.shape = Shape(dimensions, count);
  check(api.data(const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

// The shared parts of a session's kernels: a table, threads, and perhaps huge pages for its weights.
class Host {
 public:
  // `room` are the bytes that may be copied into huge pages, or Pages::kAll.
  Host(const Kernels& kernels, std::optional<size_t> room, int64_t threads, bool spins, bool low)
      : kernels(kernels), room_(room), threads_(threads), spins_(spins), low_(low) {}

  // Null if weights stay in place. Both live as long as a kernel of the session, because each holds the crew.
  std::shared_ptr<Pages> pages() const { return room_ ? shared(pages_, *room_) : nullptr; }
  std::shared_ptr<Crew> crew() const { return shared(crew_, threads_, spins_, low_); }

  // Whether all kernels of the session are gone.
  bool free_again() const {
    const std::lock_guard lock(mutex_);
    if (!used_ || !crew_.expired()) return false;
    used_ = false;
    return true;
  }

  const Kernels& kernels;

 private:
  template <class T, class... Parts>
  std::shared_ptr<T> shared(std::weak_ptr<T>& known, const Parts&... parts) const {
    const std::lock_guard lock(mutex_);
    auto object = known.lock();
    used_ = true;
    if (object == nullptr) known = object = std::make_shared<T>(parts...);
    return object;
  }

  std::optional<size_t> room_;
  int64_t threads_;
  bool spins_, low_;
  mutable bool used_ = false;
  mutable std::mutex mutex_;
  mutable std::weak_ptr<Pages> pages_;
  mutable std::weak_ptr<Crew> crew_;
};

// The inputs for making a kernel.
class Info {
 public:
  Info(const Api& api, const OrtKernelInfo* info, std::span<const ort::Input> inputs)
      : api_(api), info_(info), inputs_(inputs) {}

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

  // Attributes that a graph may leave out; then they are `otherwise`.
  int64_t number(const char* name, int64_t otherwise) const {
    int64_t value = 0;
    return is_there(api_.int_attribute(info_, name, &value)) ? value : otherwise;
  }

  float real(const char* name, float otherwise) const {
    float value = 0;
    return is_there(api_.float_attribute(info_, name, &value)) ? value : otherwise;
  }

  std::string text(const char* name) const {
    return text_of([&](char* out, size_t* size) { return api_.string_attribute(info_, name, out, size); });
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
    return read(api_, value, inputs_[std::min(index, inputs_.size() - 1)]);
  }

 private:
  bool is_there(OrtStatus* status) const {
    if (status != nullptr) api_.release_status(status);
    return status == nullptr;
  }

  const Api& api_;
  const OrtKernelInfo* info_;
  std::span<const ort::Input> inputs_;
};

// The inputs of a pass.
class Pass {
 public:
  Pass(const Api& api, Crew& crew, OrtKernelContext* context, std::span<const ort::Input> inputs)
      : api_(api), crew_(crew), context_(context), inputs_(inputs) {}

  Tensor input(size_t index) const {
    const OrtValue* value = nullptr;
    check(api_.input(context_, index, &value));
    return read(api_, value, inputs_[index]);
  }

  // An input of float32 that may be absent, of `size` elements.
  const float* vector(size_t index, int64_t size, const char* otherwise) const {
    const Tensor tensor = input(index);
    require(!tensor || tensor.size() == size, otherwise);
    return tensor.floats();
  }

  template <class T>
  T* output(size_t index, const Shape& shape) const {
    OrtValue* value = nullptr;
    check(api_.output(context_, index, shape.data(), shape.size(), &value));
    require(value != nullptr, "a node lacks an output");
    void* data = nullptr;
    check(api_.data(value, &data));
    return static_cast<T*>(data);
  }

  int64_t threads() const { return crew_.threads(); }

  // run(i) for i below `count`, on the session's threads. One exception of theirs is thrown again.
  template <class Run>
  void spread(int64_t count, const Run& run, const Weights* weights = nullptr) const {
    std::atomic<bool> failed = false;
    std::exception_ptr failure;
    const auto guarded = [&](int64_t i) {
      try {
        run(i);
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
    };
    crew_.spread(count, guarded, weights);
    if (failed) std::rethrow_exception(failure);
  }

 private:
  const Api& api_;
  Crew& crew_;
  OrtKernelContext* context_;
  std::span<const ort::Input> inputs_;
};

// Bytes of a buffer that need no allocation. Checks of memory set 0, because they see only the ends of what is
// allocated.
#if !defined(EDGESPEC_SMALL_BUFFER)
#define EDGESPEC_SMALL_BUFFER 4096
#endif

// Numbers of a scope, not set. Allocations took a fifth of a short attention's instructions, so a small buffer has
// its numbers within itself.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = sizeof(T) * static_cast<size_t>(count);
    is_small_ = bytes <= EDGESPEC_SMALL_BUFFER;
    data_ = static_cast<T*>(is_small_ ? static_cast<void*>(small_) : ::operator new(bytes, std::align_val_t(64)));
  }
  ~Buffer() {
    if (!is_small_) ::operator delete(data_, std::align_val_t(64));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }

 private:
  bool is_small_;
  T* data_;
  alignas(64) std::byte small_[EDGESPEC_SMALL_BUFFER + 64];
};

constexpr int64_t kMost = int64_t{1} << 30;  // the most of any width: three products of two fit 64 bits

inline Part part_of(std::string_view format, int64_t columns, int64_t inputs, const Tensor& weights) {
  require(columns > 0 && columns < kMost && inputs > 0 && inputs < kMost, "a matrix has impossible widths");
  for (int index = 0; index < kFormatCount; index++) {
    const FormatInfo& known = kFormats[index];
    if (format != known.name) continue;
    require(inputs % known.inputs == 0, "a matrix's inputs are no multiple of its format's block");
    const Part part{static_cast<const uint8_t*>(weights.data), columns, index};
    const bool fits = part.bytes(inputs) == static_cast<size_t>(weights.size());
    require(fits, "a matrix has more or fewer bytes than its widths take");
    return part;
  }
  throw Refusal("no format of weights is called " + std::string(format));
}

// Reads "Q4_K:1536,Q6_K:256", and a tensor for each part, from input `first` on.
inline std::vector<Part> parts_of(const Info& info, std::string_view text, int64_t inputs, size_t first) {
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

}  // namespace edgespec
