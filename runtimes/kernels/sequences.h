// Of which sequences a pass is, and where these keep what they do.
#pragma once

#include <cstring>
#include <vector>

#include "context.h"

namespace edgespec {

// Rows of a pass that follow each other in one sequence.
struct Rows {
  int64_t begin;  // of the sequence, in the cache
  int64_t past;   // tokens of the sequence before them
  int64_t count;
  int64_t first;  // of the pass's rows
};

// (s, 3) numbers say of each sequence where it begins in a cache of `capacity` tokens, how many tokens lie there, and
// how many of the pass's `rows` follow.
inline std::vector<Rows> sequences_of(const Tensor& given, int64_t capacity, int64_t rows) {
  const bool shaped = given.type == ort::kInt64 && given.shape.size() == 2 && given.last() == 3;
  require(shaped, "the sequences are no int64 (sequences, 3)");
  std::vector<Rows> sequences;
  int64_t first = 0;
  const auto* each = static_cast<const int64_t*>(given.data);
  for (int64_t i = 0; i < given.shape[0]; i++, each += 3) {
    const Rows one = {each[0], each[1], each[2], first};
    require(one.begin >= 0 && one.begin % kLanes == 0 && one.begin <= capacity,
            "a sequence begins outside the KV cache, or not at a multiple of 16");
    const int64_t room = capacity - one.begin;
    require(one.past >= 0 && one.past <= room && one.count >= 0 && one.count <= room - one.past,
            "a pass has more tokens than its KV cache has room for");
    require(one.count <= rows - first, "the sequences have more rows than the pass");
    for (const Rows& other : sequences)
      require(one.begin + one.past + one.count <= other.begin || other.begin + other.past + other.count <= one.begin,
              "two sequences share a part of the KV cache");
    first += one.count;
    sequences.push_back(one);
  }
  require(first == rows, "the sequences have fewer rows than the pass");
  return sequences;
}

constexpr int64_t kLogged = 16;  // rows of a pass that a layer with a state can undo
constexpr int64_t kTokens = 32;  // of a block, from whose end a sequence may go on

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
