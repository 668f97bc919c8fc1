// Where weights lie: in huge pages, for fewer lookups in the page tables, or in the bundle's file, mapped.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <fcntl.h>
#endif

namespace edgespec {

// Weights that lie in a mapped file.
struct Mapped {
  const uint8_t* data;
  size_t size;

  // Tells the system to begin reading them from the disk, unless they are in memory, and does not wait.
  void ask() const {
#if defined(_WIN32)
    WIN32_MEMORY_RANGE_ENTRY range{const_cast<uint8_t*>(data), size};
    PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
#else
    constexpr uintptr_t kAsked = 128 << 10;  // for a call Linux reads at most as much as it reads ahead
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto end = reinterpret_cast<uintptr_t>(data) + size;
    for (auto at = reinterpret_cast<uintptr_t>(data) / page * page; at < end; at += kAsked)
      madvise(reinterpret_cast<void*>(at), std::min(kAsked, end - at), MADV_WILLNEED);
#endif
  }

  // Tells the system that neighbours of a page are not needed with it.
  void scattered() const {
#if !defined(_WIN32)
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(data);
    madvise(reinterpret_cast<void*>(at / page * page), size + at % page, MADV_RANDOM);
#endif
  }
};

// Copies in large blocks, freed together.
class Pages {
 public:
  // If there is no room for all weights, `room` bytes are for weights that every pass reads whole. The others stay in
  // their file, and passes ask for them before they need them.
  static constexpr size_t kAll = SIZE_MAX;
  explicit Pages(size_t room) : room_(room) {}
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  bool all() const { return room_ == kAll; }

#if !defined(__linux__)
  const uint8_t* copy(const uint8_t* data, size_t) { return data; }
  const uint8_t* copied(const uint8_t* data) const { return data; }
#else
  ~Pages() {
    while (last_ != nullptr) {
      Block* before = last_->before;
      munmap(last_, last_->size);
      last_ = before;
    }
    if (table_ >= 0) close(table_);
  }

  // A copy of `size` bytes, or `data` itself without huge pages or memory for them. The memory of a mapped file is
  // given back piece by piece, so no matrix is in memory twice.
  const uint8_t* copy(const uint8_t* data, size_t size) {
    if (!all() && size > room_ - taken_) return data;
    if (last_ == nullptr || last_->size - used_ < size) {
      if (!grow(size)) return data;
    }
    uint8_t* place = reinterpret_cast<uint8_t*>(last_) + used_;
    for (size_t done = 0; done < size; done += kPiece) {
      const size_t piece = std::min(kPiece, size - done);
      std::memcpy(place + done, data + done, piece);
      give_back(const_cast<uint8_t*>(data) + done, piece);
    }
    used_ += rounded(size, kAlignment);
    taken_ += size;
    copies_.emplace_back(data, place);
    return place;
  }

  // The copy of the data at this address, if there is one: reading the file's pages again would bring them back.
  const uint8_t* copied(const uint8_t* data) const {
    for (const auto& [from, place] : copies_)
      if (from == data) return place;
    return data;
  }

 private:
  struct Block {
    Block* before;
    size_t size;
  };
  static constexpr size_t kHuge = size_t{2} << 20, kBlock = size_t{64} << 20, kAlignment = 64;
  static constexpr size_t kPiece = size_t{8} << 20;

  static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

  bool grow(size_t size) {
    const size_t wanted = std::max(kBlock, rounded(size + kAlignment, kHuge));
    void* memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    if (madvise(memory, wanted, MADV_HUGEPAGE) != 0) {
      munmap(memory, wanted);
      return false;
    }
    last_ = new (memory) Block{last_, wanted};
    used_ = rounded(sizeof(Block), kAlignment);
    return true;
  }

  // Gives pages of a file back; they return when they are read. Other memory would lose its content, also a copy of a
  // page that was written to. The system's table tells which kind it is.
  void give_back(uint8_t* data, size_t size) const {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // 16 or 64 KiB on some ARM systems
    const size_t skipped = rounded(reinterpret_cast<uintptr_t>(data), page) - reinterpret_cast<uintptr_t>(data);
    if (size < skipped + page) return;
    std::vector<uint64_t> pages((size - skipped) / page);
    const size_t first = (reinterpret_cast<uintptr_t>(data) + skipped) / page, bytes = sizeof(uint64_t) * pages.size();
    const ssize_t known = pread(table_, pages.data(), bytes, static_cast<off_t>(sizeof(uint64_t) * first));
    if (known != static_cast<ssize_t>(bytes)) return;
    constexpr int kOfFile = 61;
    if (std::all_of(pages.begin(), pages.end(), [](uint64_t entry) { return (entry >> kOfFile & 1) != 0; }))
      madvise(data + skipped, page * pages.size(), MADV_DONTNEED);
  }

  const int table_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  Block* last_ = nullptr;
  size_t used_ = 0, taken_ = 0;
  std::vector<std::pair<const uint8_t*, const uint8_t*>> copies_;

#endif
  const size_t room_;
};

}  // namespace edgespec
