// Which instruction sets this processor has, and the best table for it.
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace edgespec {

namespace plain { extern const Kernels kTable; }

#if defined(__x86_64__) || defined(_M_X64)

namespace avx512 { extern const Kernels kTable; }
namespace avxvnni { extern const Kernels kTable; }
namespace avx2 { extern const Kernels kTable; }

namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned subleaf) {
    if (leaf <= __get_cpuid_max(0, nullptr)) __cpuid_count(leaf, subleaf, a, b, c, d);
  }
};

bool has(unsigned bits, int bit) { return (bits >> bit & 1) != 0; }

unsigned saved_registers() {  // what the operating system keeps for a thread
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has_avx2() {
  const Leaf leaf_1(1, 0), leaf_7(7, 0);
  const bool saves = has(leaf_1.c, 27) && (saved_registers() & 6) == 6;
  return saves && has(leaf_1.c, 12) && has(leaf_1.c, 29) && has(leaf_7.b, 5);  // fma, f16c, avx2
}

bool has_avxvnni() { return has_avx2() && has(Leaf(7, 1).a, 4); }

bool has_avx512() {
  const Leaf seven(7, 0);
  if (!has_avx2() || (saved_registers() & 0xe0) != 0xe0) return false;
  return has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) && has(seven.b, 31) && has(seven.c, 11);
}

}  // namespace

#elif defined(__aarch64__)

namespace neon_dot { extern const Kernels kTable; }
namespace neon_i8mm { extern const Kernels kTable; }

namespace {

#if defined(__linux__)
bool has_dot() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }    // HWCAP_ASIMDDP
bool has_i8mm() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }  // HWCAP2_I8MM
#elif defined(__APPLE__)
bool feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot() { return feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return feature("hw.optional.arm.FEAT_I8MM"); }
#elif defined(_WIN32)
bool has_dot() { return IsProcessorFeaturePresent(43) != 0; }   // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool has_i8mm() { return IsProcessorFeaturePresent(66) != 0; }  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
#endif

}  // namespace

#endif

namespace {

const struct {
  const Kernels& table;
  bool (*runs)();
} kSets[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {avx512::kTable, has_avx512},
    {avxvnni::kTable, has_avxvnni},
    {avx2::kTable, has_avx2},
#elif defined(__aarch64__)
    {neon_i8mm::kTable, has_i8mm},
    {neon_dot::kTable, has_dot},
#endif
    {plain::kTable, [] { return true; }},
};

}  // namespace

const Kernels* find_kernels(const char* name) {
  for (const auto& set : kSets)
    if ((*name == 0 || std::strcmp(name, set.table.name) == 0) && set.runs()) return &set.table;
  return nullptr;
}

}  // namespace edgespec
