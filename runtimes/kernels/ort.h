// The part of ONNX Runtime's C API that custom operators need, declared anew. The API is a table of function
// pointers that only grows, so a function is known by its place; a test runs every operator under the
// installed onnxruntime, which is what guards the places.
#pragma once

#include <cstddef>
#include <cstdint>

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
struct OrtTensorTypeAndShapeInfo;

namespace edgespec::ort {

constexpr uint32_t kVersion = 16;  // the oldest whose kernels say what failed
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt64 = 7, kFloat16 = 10 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };
constexpr int kFailure = 1, kInvalidArgument = 2;  // OrtErrorCode

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

// The table, with its functions under their names.
class Api {
 public:
  explicit Api(const void* const* table) : table_(table) {}

  OrtStatus* create_status(int code, const char* message) const {
    return at<OrtStatus*(int, const char*)>(0)(code, message);
  }
  OrtStatus* create_domain(const char* name, OrtCustomOpDomain** out) const {
    return at<OrtStatus*(const char*, OrtCustomOpDomain**)>(26)(name, out);
  }
  OrtStatus* add_operator(OrtCustomOpDomain* domain, const CustomOp* op) const {
    return at<OrtStatus*(OrtCustomOpDomain*, const CustomOp*)>(27)(domain, op);
  }
  OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return at<OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain);
  }
  OrtStatus* data(OrtValue* value, void** out) const {
    return at<OrtStatus*(OrtValue*, void**)>(51)(value, out);
  }
  OrtStatus* element_type(const OrtTensorTypeAndShapeInfo* info, int* out) const {
    return at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>(60)(info, out);
  }
  OrtStatus* dimension_count(const OrtTensorTypeAndShapeInfo* info, size_t* out) const {
    return at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, out);
  }
  OrtStatus* dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) const {
    return at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(info, out, count);
  }
  OrtStatus* type_and_shape(const OrtValue* value, OrtTensorTypeAndShapeInfo** out) const {
    return at<OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, out);
  }
  OrtStatus* float_attribute(const OrtKernelInfo* info, const char* name, float* out) const {
    return at<OrtStatus*(const OrtKernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  OrtStatus* int_attribute(const OrtKernelInfo* info, const char* name, int64_t* out) const {
    return at<OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  OrtStatus* string_attribute(const OrtKernelInfo* info, const char* name, char* out, size_t* size) const {
    return at<OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>(87)(info, name, out, size);
  }
  OrtStatus* input(const OrtKernelContext* context, size_t index, const OrtValue** out) const {
    return at<OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index, out);
  }
  OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t dimensions,
                    OrtValue** out) const {
    return at<OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(
        context, index, shape, dimensions, out);
  }
  void release_shape(OrtTensorTypeAndShapeInfo* info) const { at<void(OrtTensorTypeAndShapeInfo*)>(99)(info); }
  OrtStatus* info_input_count(const OrtKernelInfo* info, size_t* out) const {
    return at<OrtStatus*(const OrtKernelInfo*, size_t*)>(230)(info, out);
  }
  OrtStatus* setting(const OrtSessionOptions* options, const char* key, char* out, size_t* size) const {
    return at<OrtStatus*(const OrtSessionOptions*, const char*, char*, size_t*)>(238)(options, key, out, size);
  }
  OrtStatus* has_setting(const OrtSessionOptions* options, const char* key, int* out) const {
    return at<OrtStatus*(const OrtSessionOptions*, const char*, int*)>(237)(options, key, out);
  }
  OrtStatus* constant_input(const OrtKernelInfo* info, size_t index, int* is_constant,
                            const OrtValue** out) const {
    return at<OrtStatus*(const OrtKernelInfo*, size_t, int*, const OrtValue**)>(249)(info, index, is_constant,
                                                                                     out);
  }

 private:
  template <class Function>
  struct Pointer;
  template <class R, class... A>
  struct Pointer<R(A...)> {
    typedef R(EDGESPEC_ORT_CALL* Type)(A...);
  };
  template <class Function>
  typename Pointer<Function>::Type at(size_t place) const {
    return reinterpret_cast<typename Pointer<Function>::Type>(const_cast<void*>(table_[place]));
  }

  const void* const* table_;
};

}  // namespace edgespec::ort
