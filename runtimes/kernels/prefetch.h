// Asks memory for data that is needed later.
#pragma once

#include <cstdint>

namespace edgespec {

// Asks for the line `bytes` behind `at`, which may lie behind the end of an array. It goes to the second-level cache:
// the nearest has too few misses under way at once, so that memory and arithmetic would take turns.
[[gnu::always_inline]] inline void prefetch(const void* at, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(bytes);
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
}

}  // namespace edgespec
