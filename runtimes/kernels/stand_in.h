// A stand-in for ONNX Runtime, for fuzz.cpp: a node, its tensors, and the table of functions that operators call.
// It guarantees the same as ONNX Runtime: a tensor has the bytes of its shape, and an attribute the requested type.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ort.h"

using Shape = std::vector<int64_t>;

struct OrtStatus { std::string message; };
struct OrtValue {
  int type;
  Shape shape;
  std::vector<uint8_t> bytes;  // exactly the bytes of the shape: reading one more is reported
};
using Value = std::shared_ptr<OrtValue>;

struct OrtKernelInfo {
  const edgespec::ort::CustomOp* op = nullptr;
  std::map<std::string, int64_t> numbers;
  std::map<std::string, float> reals;
  std::map<std::string, std::string> texts;
  std::vector<Value> inputs, constants;  // null: left out, or no constant
  bool in_place = false, alone = false;  // alone: the graph has the first output alone
};
struct OrtKernelContext {
  const OrtKernelInfo& node;
  uint8_t fill;
  Value outputs[4];
};
using Operators = std::vector<const edgespec::ort::CustomOp*>;
struct OrtCustomOpDomain { Operators operators; };
struct OrtSessionOptions {
  std::map<std::string, std::string> settings;
  OrtCustomOpDomain* domain = nullptr;
};
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const edgespec::ort::ApiBase*);

namespace stand_in {

constexpr int64_t kMostBytes = 1 << 18;  // of a tensor, which keeps a pass short
inline size_t element_size(int type) {
  switch (type) {
    case edgespec::ort::kUint8:
    case edgespec::ort::kInt8: return 1;
    case edgespec::ort::kFloat16: return 2;
    case edgespec::ort::kFloat: return 4;
    default: return 8;
  }
}

// Null if ONNX Runtime would make no such tensor, or if it is too large for a quick pass.
inline Value tensor(int type, const Shape& shape) {
  int64_t bytes = static_cast<int64_t>(element_size(type));
  bool sound = true;
  for (const int64_t size : shape) sound = sound && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  if (!sound || bytes > kMostBytes) return nullptr;
  return Value(new OrtValue{type, shape, std::vector<uint8_t>(static_cast<size_t>(bytes))});
}

inline OrtStatus* refused(const char* why) { return new OrtStatus{why}; }

template <class T>
OrtStatus* attribute(const std::map<std::string, T>& values, const char* name, T* out) {
  const auto at = values.find(name);
  if (at == values.end()) return refused("stand-in: no such attribute");
  *out = at->second;
  return nullptr;
}

inline OrtStatus* text(const std::map<std::string, std::string>& values, const char* name, char* out, size_t* size) {
  std::string value;
  if (OrtStatus* status = attribute(values, name, &value)) return status;
  if (out != nullptr) std::memcpy(out, value.c_str(), value.size() + 1);
  *size = value.size() + 1;
  return nullptr;
}

inline OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* dims, size_t count, OrtValue** out) {
  *out = nullptr;
  if (index > 0 && context->node.alone) return nullptr;
  const Shape shape(dims, dims + count);
  Value& value = context->outputs[index];
  const Value past = index > 0 && context->node.in_place ? context->node.inputs[index] : nullptr;
  const edgespec::ort::CustomOp* op = context->node.op;
  value = past != nullptr && past->shape == shape ? past : tensor(op->get_output_type(op, index), shape);
  if (value == nullptr) return refused("stand-in: no memory for an output");
  if (value != past) std::fill(value->bytes.begin(), value->bytes.end(), context->fill);
  *out = value.get();
  return nullptr;
}

inline const void* table[415];

template <class R, class... A>
void put(size_t place, R (*function)(A...)) { table[place] = reinterpret_cast<const void*>(function); }

inline void fill_table() {
  typedef OrtStatus S;
  typedef const OrtKernelInfo* Info;
  put(0, +[](int, const char* message) -> S* { return new S{message}; });
  put(26, +[](const char*, OrtCustomOpDomain** out) -> S* { *out = new OrtCustomOpDomain; return nullptr; });
  put(27, +[](OrtCustomOpDomain* domain, const edgespec::ort::CustomOp* op) -> S* {
    domain->operators.push_back(op);
    return nullptr;
  });
  put(28, +[](OrtSessionOptions* to, OrtCustomOpDomain* domain) -> S* { to->domain = domain; return nullptr; });
  put(51, +[](OrtValue* value, void** out) -> S* { *out = value->bytes.data(); return nullptr; });
  put(85, +[](Info info, const char* name, float* out) -> S* { return attribute(info->reals, name, out); });
  put(86, +[](Info info, const char* name, int64_t* out) -> S* { return attribute(info->numbers, name, out); });
  put(87, +[](Info info, const char* name, char* out, size_t* size) -> S* {
    return text(info->texts, name, out, size);
  });
  put(90, +[](const OrtKernelContext* context, size_t index, const OrtValue** out) -> S* {
    *out = index < context->node.inputs.size() ? context->node.inputs[index].get() : nullptr;
    return nullptr;
  });
  put(91, output);
  put(93, +[](OrtStatus* status) { delete status; });
  put(230, +[](Info info, size_t* out) -> S* { *out = info->inputs.size(); return nullptr; });
  put(237, +[](const OrtSessionOptions* from, const char* key, int* out) -> S* {
    *out = static_cast<int>(from->settings.count(key));
    return nullptr;
  });
  put(238, +[](const OrtSessionOptions* from, const char* key, char* out, size_t* size) -> S* {
    return text(from->settings, key, out, size);
  });
  put(249, +[](Info info, size_t index, int* is_constant, const OrtValue** out) -> S* {
    *out = index < info->constants.size() ? info->constants[index].get() : nullptr;
    *is_constant = *out != nullptr;
    return nullptr;
  });
  put(414, +[](const OrtValue* value, int* type, const int64_t** shape, size_t* count) -> S* {
    *type = value->type, *shape = value->shape.data(), *count = value->shape.size();
    return nullptr;
  });
}

}  // namespace stand_in
