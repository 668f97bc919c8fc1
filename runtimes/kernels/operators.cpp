// The operators of domain `edgespec`, for ONNX Runtime. They run on threads of their own, whose number is a setting of
// the session. A graph is checked when its kernels are made, and the tensors of a pass when it runs; nothing is read
// past the end of a tensor.
#include <memory>
#include <mutex>
#include <tuple>

#include "attention.h"
#include "convolution.h"
#include "delta.h"
#include "experts.h"
#include "full_attention.h"
#include "gates.h"
#include "head_linear.h"
#include "linear.h"
#include "logits.h"
#include "lookup.h"
#include "mamba.h"

namespace edgespec {
namespace {

// An operator as ONNX Runtime sees it, over one table of kernels.
template <class Operator>
class Registered : public ort::CustomOp {
 public:
  Registered(const Api& api, const Host& host) : ort::CustomOp{}, api_(api), host_(host) {
    version = ort::kVersion;
    get_name = [](const CustomOp*) { return Operator::kName; };
    get_provider = [](const CustomOp*) -> const char* { return nullptr; };
    get_input_type = [](const CustomOp*, size_t i) -> int { return kInputs[i].type; };
    get_input_count = [](const CustomOp*) { return kInputs.size(); };
    get_output_type = [](const CustomOp*, size_t i) -> int { return Operator::kOutputs[i]; };
    get_output_count = [](const CustomOp*) { return Operator::kOutputs.size(); };
    get_input_characteristic = [](const CustomOp*, size_t i) -> int { return kInputs[i].presence; };
    get_output_characteristic = [](const CustomOp*, size_t i) { return int{i == 0 ? ort::kRequired : ort::kOptional}; };
    get_input_memory = [](const CustomOp*, size_t) { return 0; };
    get_variadic_input_least = get_variadic_output_least = [](const CustomOp*) { return 1; };
    get_variadic_input_alike = get_variadic_output_alike = [](const CustomOp*) { return 1; };
    create_kernel_v2 = create;
    compute_v2 = [](void* kernel, OrtKernelContext* context) {
      const auto* made = static_cast<const Made*>(kernel);
      return guarded(made->api, [&] { made->op.run(Pass(made->api, *made->crew, context, kInputs)); });
    };
    destroy = [](void* kernel) { delete static_cast<Made*>(kernel); };
  }

 private:
  static constexpr std::span<const ort::Input> kInputs = Operator::kInputs.list;

  struct Made {
    const Api& api;
    std::shared_ptr<Crew> crew;
    Operator op;
  };

  static OrtStatus* create(const CustomOp* op, const void*, const OrtKernelInfo* info, void** out) {
    const auto* self = static_cast<const Registered*>(op);
    return guarded(self->api_, [&] {
      *out = new Made{self->api_, self->host_.crew(), Operator(Info(self->api_, info, kInputs), self->host_)};
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
  const Host& host_;
};

// How the operators of a session run.
struct Settings {
  const Kernels* kernels;
  std::optional<size_t> room;
  int64_t threads;
  bool spins, low;

  bool operator==(const Settings&) const = default;
};

// The operators of one session's options.
template <class... Operators>
struct DomainOf {
  DomainOf(const void* const* table, const Settings& settings)
      : api(table),
        settings(settings),
        host(*settings.kernels, settings.room, settings.threads, settings.spins, settings.low),
        operators(Registered<Operators>(api, host)...) {
    check(api.create_domain("edgespec", &domain));
    std::apply([&](const auto&... op) { (check(api.add_operator(domain, &op)), ...); }, operators);
  }

  Api api;
  Settings settings;
  Host host;
  std::tuple<Registered<Operators>...> operators;
  OrtCustomOpDomain* domain = nullptr;
};

// Every operator, each from a header above.
using Domain = DomainOf<Linear, HeadLinear, Experts, Attention, Attention8, FullAttention, HeadGate, Delta, Mamba,
                        ShortConv, Embedding, LayerInputs, InputGate, Cap, Clusters, Choose>;

// Nothing says when ONNX Runtime no longer needs a domain, so none is freed, not even when the process ends. A domain
// whose session is gone with all its kernels serves the next session with the same settings.
Domain& domain_for(const void* const* table, const Settings& settings) {
  static std::mutex mutex;
  static auto& domains = *new std::vector<std::unique_ptr<Domain>>;
  const std::lock_guard lock(mutex);
  for (const auto& known : domains)
    if (known->settings == settings && known->host.free_again()) return *known;
  domains.push_back(std::make_unique<Domain>(table, settings));
  return *domains.back();
}

std::string setting(const Api& api, OrtSessionOptions* options, const char* key) {
  int is_set = 0;
  check(api.has_setting(options, key, &is_set));
  if (is_set == 0) return {};
  return text_of([&](char* out, size_t* size) { return api.setting(options, key, out, size); });
}

}  // namespace
}  // namespace edgespec

#if defined(_WIN32)
#define EDGESPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGESPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// ONNX Runtime calls it. The session's setting `edgespec.instructions` names the set to use instead of the best, and
// `edgespec.threads` is the number of threads of a pass (1). With `edgespec.spinning` threads wait busily, with
// `edgespec.low` they give way; any value will do. `edgespec.huge_pages` copies weights into huge pages: `all`, or so
// many bytes.
EDGESPEC_EXPORT OrtStatus* EDGESPEC_ORT_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                               const edgespec::ort::ApiBase* base) {
  using namespace edgespec;
  const void* const* table = base->get_api(ort::kApiVersion);
  if (table == nullptr) return nullptr;  // too old for an error: sessions will not know the operators
  const Api api(table);
  try {
    const std::string name = setting(api, options, "edgespec.instructions");
    const Kernels* kernels = find_kernels(name.c_str());
    if (kernels == nullptr)
      return api.create_status(ort::kInvalidArgument,
                               ("edgespec: this processor has no instructions called " + name).c_str());
    const auto value = [&](const char* key) { return setting(api, options, key); };
    const std::string threads = value("edgespec.threads");
    int64_t count = 1;
    std::from_chars(threads.data(), threads.data() + threads.size(), count);
    const std::string copied = value("edgespec.huge_pages");
    size_t room = Pages::kAll;
    std::from_chars(copied.data(), copied.data() + copied.size(), room);
    const auto pages = copied.empty() ? std::nullopt : std::optional(room);
    const Domain& domain = domain_for(table, {kernels, pages, std::clamp<int64_t>(count, 1, 1 << 12),
                                              !value("edgespec.spinning").empty(), !value("edgespec.low").empty()});
    check(api.add_domain(options, domain.domain));
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    return api.create_status(ort::kFailure, error.what());
  }
}

// The best set of instructions that this processor has; for reports.
EDGESPEC_EXPORT const char* edgespec_instructions() { return edgespec::find_kernels("")->name; }
EDGESPEC_EXPORT void edgespec_lower_priority() { edgespec::lower_priority(); }
