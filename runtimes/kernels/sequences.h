// The sequences of a pass, and where their caches and states lie.
#pragma once

#include <cstring>
#include <vector>

#include "context.h"

namespace edgespec {

// The rows of a sequence in a pass.
struct Rows {
  const int64_t* blocks;  // the sequence's blocks of 32 tokens; null if nothing is kept by token
  int64_t past;           // tokens of the sequence before these rows
  int64_t count;
  int64_t first;  // the number of the first row in the pass
};

// Reads numbers (s, 2): the tokens that each sequence has, and how many of the pass's `rows` follow them.
inline std::vector<Rows> sequences_of(const Tensor& counts, int64_t rows) {
  constexpr int64_t most = int64_t{1} << 40;
  const bool shaped = counts.shape.size() == 2 && counts.last() == 2;
  require(shaped, "the sequences are no int64 (sequences, 2)");
  std::vector<Rows> sequences;
  int64_t first = 0;
  const auto* numbers = static_cast<const int64_t*>(counts.data);
  for (int64_t i = 0; i < counts.shape[0]; i++, numbers += 2) {
    const Rows own = {nullptr, numbers[0], numbers[1], first};
    require(own.past >= 0 && own.past <= most && own.count >= 0, "a sequence has an impossible number of tokens");
    require(own.count <= rows - first, "the sequences have more rows than the pass");
    first += own.count;
    sequences.push_back(own);
  }
  require(first == rows, "the sequences have fewer rows than the pass");
  return sequences;
}

constexpr int64_t kLogged = 16;  // rows of a pass that a layer with a state can undo

// Gives the sequences their blocks. The table has the blocks of one sequence after the other, as many as their tokens
// take; there are `count` in all. Sequences may share a block that they read, but not one that a pass writes.
inline void give_blocks(std::vector<Rows>& sequences, const Tensor& table, int64_t count, bool writes) {
  require(table.shape.size() == 1, "the blocks are no int64 (blocks)");
  const auto* numbers = static_cast<const int64_t*>(table.data);
  const int64_t size = table.shape[0];
  int64_t first = 0;
  enum Use : uint8_t { kFree, kRead, kWritten };
  std::vector<Use> uses(static_cast<size_t>(count));
  for (Rows& rows : sequences) {
    const int64_t end = first + (rows.past + rows.count + kTokens - 1) / kTokens;
    require(end <= size, "the sequences have fewer blocks than their tokens take");
    rows.blocks = numbers + first;
    for (int64_t at = first; at < end; at++) {
      require(numbers[at] >= 0 && numbers[at] < count, "a block is none of those that there are");
      Use& use = uses[static_cast<size_t>(numbers[at])];
      const bool written = writes && rows.count > 0 && at - first >= rows.past / kTokens;
      require(use == kFree || (use == kRead && !written), "a block that a pass writes to is there twice");
      use = written ? kWritten : kRead;
    }
    first = end;
  }
  require(first == size, "the sequences have more blocks than their tokens take");
}

// The slot of a sequence's states, and the number of tokens that they have read.
struct Place {
  int64_t slot, behind;
};

// Reads the places of the sequences from numbers (s, 2).
inline std::vector<Place> places_of(const Tensor& table, const std::vector<Rows>& sequences, int64_t slots) {
  const bool shaped = table.shape.size() == 2 && table.last() == 2 &&
                      table.shape[0] == static_cast<int64_t>(sequences.size());
  require(shaped, "the places are no int64 (sequences, 2)");
  std::vector<Place> places;
  const auto* numbers = static_cast<const int64_t*>(table.data);
  for (size_t i = 0; i < sequences.size(); i++, numbers += 2) {
    const Place own = {numbers[0], numbers[1]};
    require(own.slot >= 0 && own.slot < slots, "a sequence's slot is none of those that there are");
    require(own.behind >= 0 && own.behind <= sequences[i].past && sequences[i].past - own.behind <= kLogged,
            "a sequence's states lie behind more tokens than it has, or too few");
    for (const Place& other : places) require(own.slot != other.slot, "two sequences share a slot");
    places.push_back(own);
  }
  return places;
}

// Output `index`, with the content of `past`. If the pass binds the same buffer to both, nothing is copied.
template <class T>
T* kept(const Pass& pass, size_t index, const Tensor& past) {
  T* now = pass.output<T>(index, past.shape);
  if (now != past.data && past.size() > 0) std::memcpy(now, past.data, sizeof(T) * static_cast<size_t>(past.size()));
  return now;
}

}  // namespace edgespec
