// The part of ONNX Runtime's C API that custom operators need, declared anew. The API is a table of function pointers
// that only grows, so a place identifies a function. A test runs every operator under the installed onnxruntime,
// which checks the places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#if defined(_WIN32) && !defined(_WIN64)
#define EDGESPEC_ORT_CALL __stdcall
#else
#define EDGESPEC_ORT_CALL
#endif

struct OrtStatus;
struct OrtValue;
struct OrtSessionOptions;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtCustomOpDomain;

namespace edgespec::ort {

constexpr uint32_t kVersion = 16;  // the oldest version whose kernels return errors
constexpr uint32_t kApiVersion = 24;  // the oldest version whose tensors show their shape without a copy
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kFloat16 = 10 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
constexpr int kFailure = 1, kInvalidArgument = 2;  // OrtErrorCode

// An operator's inputs, in their order. The graph's nodes have the same order.
struct Input {
  const char* name;
  ElementType type;
  Characteristic presence = kRequired;
};
template <size_t N>
struct Inputs {
  Input list[N];
  constexpr Inputs(const Input (&inputs)[N]) : list{} {
    for (size_t i = 0; i < N; i++) list[i] = inputs[i];
  }
  // The position of an input.
  consteval size_t operator[](std::string_view name) const {
    size_t i = 0;
    while (name != list[i].name) i++;  // no constant behind the last input
    return i;
  }
};

struct CustomOp {
  uint32_t version;
  void*(EDGESPEC_ORT_CALL* create_kernel)(const CustomOp*, const void*, const OrtKernelInfo*);
  const char*(EDGESPEC_ORT_CALL* get_name)(const CustomOp*);
  const char*(EDGESPEC_ORT_CALL* get_provider)(const CustomOp*);
  int(EDGESPEC_ORT_CALL* get_input_type)(const CustomOp*, size_t);
  size_t(EDGESPEC_ORT_CALL* get_input_count)(const CustomOp*);
  int(EDGESPEC_ORT_CALL* get_output_type)(const CustomOp*, size_t);
  size_t(EDGESPEC_ORT_CALL* get_output_count)(const CustomOp*);
  void(EDGESPEC_ORT_CALL* compute)(void*, OrtKernelContext*);
  void(EDGESPEC_ORT_CALL* destroy)(void*);
  int(EDGESPEC_ORT_CALL* get_input_characteristic)(const CustomOp*, size_t);
  int(EDGESPEC_ORT_CALL* get_output_characteristic)(const CustomOp*, size_t);
  int(EDGESPEC_ORT_CALL* get_input_memory)(const CustomOp*, size_t);
  int(EDGESPEC_ORT_CALL* get_variadic_input_least)(const CustomOp*);
  int(EDGESPEC_ORT_CALL* get_variadic_input_alike)(const CustomOp*);
  int(EDGESPEC_ORT_CALL* get_variadic_output_least)(const CustomOp*);
  int(EDGESPEC_ORT_CALL* get_variadic_output_alike)(const CustomOp*);
  OrtStatus*(EDGESPEC_ORT_CALL* create_kernel_v2)(const CustomOp*, const void*, const OrtKernelInfo*, void**);
  OrtStatus*(EDGESPEC_ORT_CALL* compute_v2)(void*, OrtKernelContext*);
  void* later[7];  // shapes, versions, aliases: not used
};
static_assert(sizeof(CustomOp) == 208 || sizeof(void*) != 8);

struct ApiBase {
  const void* const*(EDGESPEC_ORT_CALL* get_api)(uint32_t version);
  const char*(EDGESPEC_ORT_CALL* get_version)();
};

// The table's functions, under their names.
class Api {
  struct Function {
    const void* address;
    template <class Type>
    operator Type*() const { return reinterpret_cast<Type*>(const_cast<void*>(address)); }
  };
  Function at(size_t place) const { return {table_[place]}; }
  const void* const* table_;

  template <class... Arguments>
  using Call = OrtStatus*(EDGESPEC_ORT_CALL*)(Arguments...);

 public:
  explicit Api(const void* const* table) : table_(table) {}

  Call<int, const char*> create_status = at(0);
  Call<const char*, OrtCustomOpDomain**> create_domain = at(26);
  Call<OrtCustomOpDomain*, const CustomOp*> add_operator = at(27);
  Call<OrtSessionOptions*, OrtCustomOpDomain*> add_domain = at(28);
  Call<OrtValue*, void**> data = at(51);
  Call<const OrtKernelInfo*, const char*, float*> float_attribute = at(85);
  Call<const OrtKernelInfo*, const char*, int64_t*> int_attribute = at(86);
  Call<const OrtKernelInfo*, const char*, char*, size_t*> string_attribute = at(87);
  Call<const OrtKernelContext*, size_t, const OrtValue**> input = at(90);
  Call<OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**> output = at(91);
  void(EDGESPEC_ORT_CALL* release_status)(OrtStatus*) = at(93);
  Call<const OrtKernelInfo*, size_t*> info_input_count = at(230);
  Call<const OrtSessionOptions*, const char*, int*> has_setting = at(237);
  Call<const OrtSessionOptions*, const char*, char*, size_t*> setting = at(238);
  Call<const OrtKernelInfo*, size_t, int*, const OrtValue**> constant_input = at(249);
  Call<const OrtValue*, int*, const int64_t**, size_t*> type_and_shape = at(414);
};

}  // namespace edgespec::ort
