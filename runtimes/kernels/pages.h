// Memory in huge pages, for weights that every pass reads whole: fewer lookups in the page tables.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace edgespec {

// Copies in large blocks, freed together.
class Pages {
 public:
  Pages() = default;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

#if !defined(__linux__)
  const uint8_t* copy(const uint8_t* data, size_t) { return data; }
#else
  ~Pages() {
    while (last_ != nullptr) {
      Block* before = last_->before;
      munmap(last_, last_->size);
      last_ = before;
    }
  }

  // A copy of `size` bytes; or `data` itself where there are no huge pages, or no memory for them. What a
  // mapped file takes of the process's memory is given back piece by piece, so that no matrix is there twice.
  const uint8_t* copy(const uint8_t* data, size_t size) {
    if (last_ == nullptr || last_->size - used_ < size) {
      if (!grow(size)) return data;
    }
    uint8_t* place = reinterpret_cast<uint8_t*>(last_) + used_;
    for (size_t done = 0; done < size; done += kPiece) {
      const size_t piece = std::min(kPiece, size - done);
      std::memcpy(place + done, data + done, piece);
      give_back(const_cast<uint8_t*>(data) + done, place + done, piece);
    }
    used_ += rounded(size, kAlignment);
    return place;
  }

 private:
  struct Block {
    Block* before;
    size_t size;
  };
  static constexpr size_t kHuge = size_t{2} << 20, kBlock = size_t{64} << 20, kPage = 4096, kAlignment = 64;
  static constexpr size_t kPiece = size_t{8} << 20;

  static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

  bool grow(size_t size) {
    const size_t wanted = std::max(kBlock, rounded(size + kAlignment, kHuge));
    void* found = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return false;
    if (madvise(found, wanted, MADV_HUGEPAGE) != 0) {
      munmap(found, wanted);
      return false;
    }
    last_ = new (found) Block{last_, wanted};
    used_ = rounded(sizeof(Block), kAlignment);
    return true;
  }

  // Pages of a file come back when they are read. Were they not a file's, they are zeros now: written again.
  static void give_back(uint8_t* data, const uint8_t* copy, size_t size) {
    const size_t skipped = rounded(reinterpret_cast<uintptr_t>(data), kPage) - reinterpret_cast<uintptr_t>(data);
    if (size < skipped + kPage) return;
    const size_t length = (size - skipped) / kPage * kPage;
    const uint8_t* end = copy + skipped + length;
    const uint8_t* shown = std::find_if(copy + skipped, end, [](uint8_t each) { return each != 0; });
    if (shown == end || madvise(data + skipped, length, MADV_DONTNEED) != 0) return;
    if (data[shown - copy] != *shown) std::memcpy(data, copy, size);
  }

  Block* last_ = nullptr;
  size_t used_ = 0;
#endif
};

}  // namespace edgespec
