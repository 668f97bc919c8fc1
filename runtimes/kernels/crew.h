// The threads of a session, for the work of a pass.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "pages.h"
#include "prefetch.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <pthread.h>
#include <sys/resource.h>
#endif

namespace edgespec {

// Lets threads of other programs go before this thread; on Linux that cannot be undone.
inline void lower_priority() {
#if defined(_WIN32)
  SetThreadPriority(GetCurrentThread(), THREAD_PRIORITY_LOWEST);
#elif defined(__APPLE__)
  pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0);  // the class below never gets a fast core
#else
  setpriority(PRIO_PROCESS, 0, 19);  // 0 is this thread
#endif
}

// Linux shares cores among sessions and services before it looks at priorities. So a thread that had to share its
// core sleeps, longer each time, and wakes on a free core if there is one.
class Manners {
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::duration kLook = std::chrono::milliseconds(2);

 public:
  void begin() { since_ = Clock::now(), ran_ = ran(); }
  void end() {
    worked_ += Clock::now() - since_, had_ += ran() - ran_;
    if (worked_ < kLook) return;
    const bool shared = worked_ - had_ > worked_ / 4;
    rest_ = shared ? std::clamp(2 * rest_, kLook / 2, 32 * kLook) : rest_ - rest_ / 16;
    worked_ = had_ = {};
    if (shared) std::this_thread::sleep_for(rest_);
  }

 private:
  static Clock::duration ran() {
#if defined(__linux__)
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
#else
    return Clock::now().time_since_epoch();  // elsewhere priorities are enough
#endif
  }
  Clock::time_point since_;
  Clock::duration ran_{0}, worked_{0}, had_{0}, rest_{0};
};

// How many forks led from the process that loaded this library to the present one.
inline std::atomic<int64_t> forks = 0;
#if !defined(_WIN32)
inline const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks++; });
#endif

// Weights of a product: where each thread begins to read them (two places if it reads two matrices in turn, else the
// second is null), the matrices that stay in their file, and the weights that the pass reads next.
struct Weights {
  std::vector<std::array<const uint8_t*, 2>> starts;
  std::vector<Mapped> mapped;
  const Weights* next = nullptr;
};

// Work is cut into more pieces than there are threads. Each thread begins with pieces that lie side by side, and then
// takes the pieces of others. So a slow core delays the others by a piece at most. But when another program wants a
// core, the system takes it for milliseconds, in the midst of a piece, and all threads wait. So helpers offer their
// core before that happens, between two pieces, when no thread waits for them.
class Crew {
 public:
  // With `spins` helpers wait busily for a moment, because waking them costs about as much as a little work. With
  // `low` all threads give way to other programs.
  Crew(int64_t threads, bool spins, bool low)
      : spin_(spins ? kSpin : Clock::duration(0)), low_(low), shares_(static_cast<size_t>(threads)) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() {
    settle();
    open(kStopped);
    for (std::thread& helper : helpers_) helper.join();
  }

  int64_t threads() const { return static_cast<int64_t>(shares_.size()); }

  // The first of `count` pieces that thread `t` takes.
  int64_t first(int64_t count, int64_t t) const { return count * t / std::min(threads(), count); }

  // Adds weights to the end of the order in which a pass reads them.
  const Weights* follow(Weights weights) {
    const std::lock_guard pass(pass_);
    Weights* before = order_.empty() ? nullptr : &order_.back();
    order_.push_back(std::move(weights));
    if (before != nullptr) before->next = &order_.back();
    return &order_.back();
  }

  // Calls run(i) once for every i below `count`; `run` must not throw. Simultaneous passes run without helpers. If
  // the job reads `weights`, waiting threads prefetch the weights behind them.
  template <class Run>
  void spread(int64_t count, const Run& run, const Weights* weights) {
    settle();
    const std::unique_lock pass(pass_, std::try_to_lock);
    if (pass.owns_lock() && weights != nullptr) next_ = weights->next;
    if (count < 2 || !pass.owns_lock() || shares_.size() == 1) {
      for (int64_t i = 0; i < count; i++) run(i);
      return;
    }
    hire();
    piece_ = [](const void* data, int64_t i) { (*static_cast<const Run*>(data))(i); };
    data_ = &run;
    for (int64_t t = 0; t < threads(); t++) {
      Share& share = shares_[static_cast<size_t>(t)];
      share.next = t < count ? first(count, t) : 0;
      share.end = t < count ? first(count, t + 1) : 0;
    }
    const int64_t job = job_ + 1;
    open(job);
    if (low_) manners_.begin();
    for (int64_t i; (i = taken(0)) >= 0;) run(i);
    if (low_) manners_.end();
    const int patience = spin_.count() != 0 ? kPatience : 0;
    job_ = job + 1;  // closed: no further thread enters
    Ahead ahead(next_, 0);
    for (int spins = 0; inside_ != 0;) {
      if (spins++ < patience) {
        ahead.step();
      } else {
        spins = patience;
        std::this_thread::yield();
      }
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::duration kSpin = std::chrono::microseconds(50), kOffer = std::chrono::milliseconds(2);
  static constexpr int kPatience = 20000;
  static constexpr int64_t kStopped = -2;  // a job's number is odd while it is open

  struct alignas(64) Share {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };

  // Prefetches weights while a thread waits busily.
  class Ahead {
   public:
    Ahead(const Weights* next, size_t t) {
      if (next != nullptr) starts_ = next->starts[t];
    }
    void step() {
      if (at_ == kMost || starts_[0] == nullptr) return pause();
      for (const uint8_t* start : starts_)
        if (start != nullptr) prefetch(start, at_);
      at_ += 64;
    }

   private:
    static constexpr int64_t kMost = 128 << 10;
    std::array<const uint8_t*, 2> starts_{};
    int64_t at_ = 0;
  };

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  // Begins anew in a forked process. The helpers stayed in the other one, and may hold locks here, so nothing that they
  // use is destroyed, which would wait for them.
  void settle() {
    if (forks_ == forks) return;
    static std::mutex settling;
    const std::lock_guard lock(settling);
    if (forks_ == forks) return;
    new (&helpers_) std::vector<std::thread>;
    new (&pass_) std::mutex;
    new (&sleep_) std::mutex;
    new (&wake_) std::condition_variable;
    inside_ = asleep_ = 0;
    started_ = 0;
    job_ += job_ % 2;
    hired_ = false;
    forks_ = forks.load();
  }

  void hire() {
    if (hired_) return;
    hired_ = true;
    try {
      for (size_t t = 1; t < shares_.size(); t++) helpers_.emplace_back([this, t] { help(t); });
    } catch (const std::exception&) {  // the crew has as many helpers as the system gives
    }
    // The first thread holds a lock of the C++ library while it starts. A process forked meanwhile would wait for it.
    while (started_ < static_cast<int64_t>(helpers_.size())) std::this_thread::yield();
  }

  // Takes a free piece, first from thread `t`'s share; -1 if no piece is left.
  int64_t taken(size_t t) {
    for (size_t s = 0; s < shares_.size(); s++) {
      Share& share = shares_[(t + s) % shares_.size()];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      const int64_t i = share.next++;
      if (i < share.end) return i;
    }
    return -1;
  }

  void open(int64_t job) {
    job_ = job;
    if (asleep_ == 0) return;
    { const std::lock_guard lock(sleep_); }
    wake_.notify_all();
  }

  void help(size_t t) {
    started_++;
    Manners manners;
    if (low_) lower_priority();
    Clock::time_point offered = Clock::now();
    for (int64_t job, seen = 0; (job = awaited(t, seen, offered)) != kStopped;) {
      seen = job;
      if (low_) manners.begin();
      inside_++;
      if (job_ == job)  // else the job was closed meanwhile
        for (int64_t i; Clock::now() - offered < kOffer && (i = taken(t)) >= 0;) piece_(data_, i);
      inside_--;
      if (low_) manners.end();
      if (Clock::now() - offered < kOffer) continue;
      std::this_thread::yield();
      offered = Clock::now();
      seen = 0;  // the job may have more pieces
    }
  }

  // Waits for an open job that is not `seen`; its number, or kStopped.
  int64_t awaited(size_t t, int64_t seen, Clock::time_point& offered) {
    int64_t job = seen;
    Ahead ahead(next_, t);
    const auto ready = [&] {
      job = job_;
      return job == kStopped || (job % 2 != 0 && job != seen);
    };
    for (const Clock::time_point begun = Clock::now(); !ready() && Clock::now() - begun < spin_;)
      for (int i = 0; i < 32 && !ready(); i++) ahead.step();
    if (!ready()) {
      asleep_++;
      std::unique_lock lock(sleep_);
      wake_.wait(lock, ready);
      asleep_--;
      offered = Clock::now();
    }
    return job;  // the number of a ready job, which may be closed by now
  }

  const Clock::duration spin_;
  const bool low_;
  Manners manners_;  // of the thread that runs the pass
  std::mutex pass_;
  bool hired_ = false;
  std::atomic<int64_t> forks_ = forks.load();  // as of its helpers' process
  std::vector<std::thread> helpers_;
  std::atomic<int64_t> started_ = 0;

  // The job, which does not change while a helper is inside.
  void (*piece_)(const void*, int64_t) = nullptr;
  const void* data_ = nullptr;
  std::vector<Share> shares_;  // one for each thread
  std::atomic<int64_t> job_ = 0;
  std::atomic<int32_t> inside_ = 0;

  std::deque<Weights> order_;
  std::atomic<const Weights*> next_ = nullptr;

  std::atomic<int32_t> asleep_ = 0;
  std::mutex sleep_;
  std::condition_variable wake_;
};

}  // namespace edgespec
