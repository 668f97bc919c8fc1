// Jobs on a crew's threads, for ThreadSanitizer, and what a piece throws. Returns 1 where something is wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "context.h"

using namespace edgespec;

// Pieces that ran more or less often than once. Plain numbers: a piece that runs twice, or too late, is a race.
static long wrong_pieces(Crew& crew, const Weights* weights, int jobs) {
  long wrong = 0;
  for (int job = 0; job < jobs; job++) {
    std::vector<int> ran(static_cast<size_t>(1 + job % 33));
    const auto run = [&](int64_t i) { ran[static_cast<size_t>(i)]++; };
    crew.spread(static_cast<int64_t>(ran.size()), run, job % 2 ? weights : nullptr);
    for (const int count : ran) wrong += count != 1;
    if (job % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // helpers fall asleep
  }
  return wrong;
}

// Whether an exception of a piece keeps its kind and its words.
static bool keeps_words(Crew& crew) {
  const void* const table[512] = {};
  const Api api(table);
  const Pass pass(api, crew, nullptr, {});
  bool kept = false;
  try {
    pass.spread(32, [](int64_t i) { require(i != 17, "a piece has words of its own"); });
  } catch (const Refusal& refusal) {
    kept = std::string(refusal.what()) == "a piece has words of its own";
  }
  try {
    pass.spread(32, [](int64_t) { throw std::bad_alloc(); });
  } catch (const std::bad_alloc&) {
    return kept;
  }
  return false;
}

int main() {
  static uint8_t data[1 << 20];
  long wrong = 0;
  for (int kind = 0; kind < 4; kind++) {
    Crew crew(4, kind % 2 != 0, kind / 2 != 0);
    const auto weights = [] { return Weights{{4, {data, nullptr}}, {}}; };
    const Weights* first = crew.follow(weights());
    crew.follow(weights());
    wrong += wrong_pieces(crew, first, kind / 2 ? 200 : 2000);
    std::thread other([&] { wrong_pieces(crew, first, 200); });  // a pass at the same time has no helpers
    wrong += wrong_pieces(crew, first, 200);
    other.join();
    wrong += !keeps_words(crew);
  }
  std::printf("%ld wrong\n", wrong);
  return wrong != 0;
}
