// Of which sequences a pass is, and where these keep what they do.
#pragma once

#include <cstring>
#include <vector>

#include "context.h"

namespace edgespec {

// Rows of a pass that follow each other in one sequence.
struct Rows {
  const int64_t* blocks;  // of the sequence: where its tokens lie, 32 each; null where nothing is kept by token
  int64_t past;           // tokens of the sequence before them
  int64_t count;
  int64_t first;  // of the pass's rows
};

// (s, 2) numbers say of each sequence how many tokens it has, and how many of the pass's `rows` follow.
inline std::vector<Rows> sequences_of(const Tensor& given, int64_t rows) {
  constexpr int64_t most = int64_t{1} << 40;
  const bool shaped = given.type == ort::kInt64 && given.shape.size() == 2 && given.last() == 2;
  require(shaped, "the sequences are no int64 (sequences, 2)");
  std::vector<Rows> sequences;
  int64_t first = 0;
  const auto* each = static_cast<const int64_t*>(given.data);
  for (int64_t i = 0; i < given.shape[0]; i++, each += 2) {
    const Rows one = {nullptr, each[0], each[1], first};
    require(one.past >= 0 && one.past <= most && one.count >= 0, "a sequence has an impossible number of tokens");
    require(one.count <= rows - first, "the sequences have more rows than the pass");
    first += one.count;
    sequences.push_back(one);
  }
  require(first == rows, "the sequences have fewer rows than the pass");
  return sequences;
}

constexpr int64_t kLogged = 16;  // rows of a pass that a layer with a state can undo

// Gives the sequences their blocks: the numbers in `table`, of `count` that there are, sequence by sequence as many as
// its tokens take. A block may be of several, but one that is written to is of one sequence, and there once.
inline void give_blocks(std::vector<Rows>& sequences, const Tensor& table, int64_t count, bool writes) {
  require(table.type == ort::kInt64 && table.shape.size() == 1, "the blocks are no int64 (blocks)");
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

// Where a sequence's states lie: in which slot, and behind how many of its tokens.
struct Place {
  int64_t slot, behind;
};

// (s, 2) numbers say it of each of the sequences.
inline std::vector<Place> places_of(const Tensor& given, const std::vector<Rows>& sequences, int64_t slots) {
  const bool shaped = given.type == ort::kInt64 && given.shape.size() == 2 && given.last() == 2 &&
                      given.shape[0] == static_cast<int64_t>(sequences.size());
  require(shaped, "the places are no int64 (sequences, 2)");
  std::vector<Place> places;
  const auto* each = static_cast<const int64_t*>(given.data);
  for (size_t i = 0; i < sequences.size(); i++, each += 2) {
    const Place one = {each[0], each[1]};
    require(one.slot >= 0 && one.slot < slots, "a sequence's slot is none of those that there are");
    require(one.behind >= 0 && one.behind <= sequences[i].past && sequences[i].past - one.behind <= kLogged,
            "a sequence's states lie behind more tokens than it has, or too few");
    for (const Place& other : places) require(one.slot != other.slot, "two sequences share a slot");
    places.push_back(one);
  }
  return places;
}

// What is kept, now: output `index`, which holds what was before, in place where the pass binds one buffer for both.
template <class T>
T* kept(const Pass& pass, size_t index, const Tensor& past) {
  T* now = pass.output<T>(index, past.shape);
  if (now != past.data && past.size() > 0) std::memcpy(now, past.data, sizeof(T) * static_cast<size_t>(past.size()));
  return now;
}

}  // namespace edgespec
