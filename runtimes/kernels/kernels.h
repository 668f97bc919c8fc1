// The functions of an instruction set for the operators, as a table. Every table computes the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"
#include "layout.h"
#include "prefetch.h"

namespace edgespec {

// Rows of a projection that share a format. Its functions are always inlined: the linker could take a copy from the
// file of a wide set, which would not run on other processors.
struct Part {
  const uint8_t* tiles;
  int64_t columns;  // of the product
  int format;

  [[gnu::always_inline]] int64_t tile_count() const { return (columns + kLanes - 1) / kLanes; }
  [[gnu::always_inline]] size_t bytes(int64_t inputs) const {
    const FormatInfo& known = kFormats[format];
    return static_cast<size_t>(tile_count() * (inputs / known.inputs) * known.bytes);
  }
};

// `squared` is max(x, 0)^2. It and xIELU (arXiv 2411.13010) multiply nothing.
enum class Gate { none, silu, gelu, sigmoid, clamped, squared, xielu };

constexpr bool has_factor(Gate gate) { return gate != Gate::none && gate != Gate::squared && gate != Gate::xielu; }

// The numbers of an xIELU: alpha_p, alpha_n and beta.
struct Bend {
  float above, below, slope;
};

// A projection of `rows` rows. With a gate that has a factor the first half of the parts goes through the activation
// and is multiplied by the second half, whose parts have the same widths. Biases are added before.
struct Projection {
  const Part* parts;
  int64_t part_count;
  int64_t inputs;
  Gate gate;
  Bend bend;
  int64_t width;  // columns of y
  int64_t rows;
  int64_t stride;                  // of activations, from a block to the next
  const Activations* activations;  // (inputs / 32, stride)
  const float* factors;            // (rows), of the activations
  const float* bias;               // (width), or null
  const float* other_bias;         // the same, of the second half
  const float* residual;           // (rows, width), or null: added
  float* y;                        // (rows, width)
};

// Tokens of a sequence, from `first` to `limit`.
struct Span {
  int64_t first, limit;
};

constexpr int64_t kTokens = 32;   // of a block
constexpr int64_t kExtent = 256;  // tokens of eight blocks, whose keys of a head lie together, as do their values

// The form of keys and values: float16, or whole numbers of 8 bits with scales, which are bfloat16. Of keys 32 channels
// of a token share a scale, of values all.
enum class Cells { halves, bytes };

constexpr int64_t kScaled = 32;  // channels of a key that share a scale

// Bytes of a token's head.
inline int64_t key_bytes(Cells cells, int64_t head_dim) {
  return cells == Cells::halves ? 2 * head_dim : head_dim + 2 * (head_dim / kScaled);
}
inline int64_t value_bytes(Cells cells, int64_t head_dim) {
  return cells == Cells::halves ? 2 * head_dim : head_dim + 2;
}

// The blocks of a sequence in a pool (extents, heads, 256, a head's row). Mostly a block lies behind the one before.
struct BlockTable {
  const int64_t* blocks;  // their numbers
  int64_t heads, row;     // row: bytes of a token's head

  // The distance in bytes of a token's keys or values from the head's first.
  int64_t of(int64_t token) const {
    const int64_t at = blocks[token / kTokens] * kTokens + token % kTokens;
    return (at / kExtent * heads * kExtent + at % kExtent) * row;
  }
};

// Tokens `from` to `to`, whose keys or values lie one behind the other from byte `place` on. Those of the next run lie
// `ahead` bytes farther.
struct Run {
  int64_t from, to, place, ahead;
};

// 32 numbers that are rounded to 16 bits, in the form in which a set of instructions multiplies them by 8 bits. The sum
// of their products is a whole number, so the form may differ.
constexpr float kMostWord = 32512;  // whose high and low 8 bits have signs
struct WordCodes {
  int32_t fours[kGroups][2];
};

// Queries of rows and heads that share keys and values.
struct Queries {
  const Span* spans;    // (count): the tokens that each query sees
  int64_t count;
  const float* sinks;   // (count): scores that belong to no token, but have shares; null without
  float* vectors;       // (count, head_dim): rotated and scaled queries; then the sums of values by shares
  BlockTable key_table, value_table;
  Cells cells;
  // Float16: of 16 tokens each (head_dim, 16); null if a token's key is its value's row, all of it.
  // 8 bits: of 16 tokens each (head_dim / 4, 16, 4), then scales (head_dim / 32, 16).
  const uint8_t* keys;
  // Float16: of each token (head_dim), of which the first value_dim count.
  // 8 bits: of 32 tokens each (head_dim / 16, 8, 16, 4), where 4 are tokens and 16 are channels, then scales (32).
  const uint8_t* values;
  WordCodes* codes;     // (count, head_dim / 32): a place for rounded queries and shares; of 8 bits alone
  float* code_scales;   // the same for their scales
  int64_t head_dim, value_dim;
  int64_t begin, end;   // of the tokens that any query sees; `begin` is a multiple of score_step
  float* scores;        // (count, stride)
  float cap;            // the soft bound of scores; 0 without
  int64_t stride;       // score_stride of their number

  // The first run of the tokens `from` to `to`.
  Run run(const BlockTable& table, int64_t from, int64_t to) const {
    const int64_t place = table.of(from);
    int64_t stop = (from / kTokens + 1) * kTokens;
    while (stop < to && table.of(stop) == place + (stop - from) * table.row) stop += kTokens;
    stop = stop < to ? stop : to;
    return {from, stop, place, stop < end ? table.of(stop) - place : 0};
  }
};

// Tokens whose scores are computed together.
constexpr int64_t score_step(Cells cells) { return cells == Cells::halves ? kLanes : kTokens; }

// An odd number of cache lines, for whole steps: rows at a distance of a power of two would share a few lines of the
// nearest cache.
inline int64_t score_stride(Cells cells, int64_t tokens) {
  const int64_t step = score_step(cells);
  return ((tokens + step - 1) / step * step / kLanes | 1) * kLanes;
}

// Queries of a head whose rows all see each other, and the head's keys and values, rounded.
struct FullQueries {
  static constexpr int kZero = 64;  // added to the codes of queries, so that all are 1 to 127

  const uint8_t* codes;   // (count, groups, 4): a group is of four channels
  const float* scales;    // (count)
  int64_t count, groups;
  // Of 16 keys each (groups, 16, 4) codes, minus kZero times their sums (16), int32, and scales (16).
  const uint8_t* keys;
  const uint8_t* values;  // of 32 rows each (tiles, 8, 16, 4), where 4 are rows and 16 are channels
  int64_t rows, tiles;    // of keys and values, and of 16 channels
  float* sums;            // (count, 16 * tiles): written, of values' codes by shares
  float* totals;          // (count): written, of shares
};

// Bytes of 16 keys.
inline int64_t full_key_bytes(int64_t groups) { return (groups + 2) * kLine; }

// A row's change of the state of a value head: state = decay * state + key delta'.
struct Update {
  const float* key;    // (key_width)
  const float* delta;  // (16 * tiles)
  float decay;
};

// Rows of a sequence through the state of a value head, one after the other. A row reads the state behind the rows
// before it, adds `delta = strength (value - decay state' key)`, and gives state' query (arXiv 2412.06464). A sum adds
// `delta = strength value` instead, and gives `skip value` besides (arXiv 2405.21060).
struct Recurrence {
  float* state;  // (tiles, key_width, 16)
  float* copy;   // (kStateTiles, key_width, 16): rows change this copy, the state only by `updates`; or null
  int64_t key_width, tiles;
  const Update* updates;  // updates of earlier rows, which the state lacks
  int64_t update_count;
  int64_t rows;
  const float *queries, *keys;      // (rows, key_width)
  const float *decays, *strengths;  // (rows)
  float* deltas;                    // (rows, 16 * tiles): values; then each row's delta
  float* y;                         // (rows, stride)
  int64_t stride;
  bool sums;
  float skip;
};

constexpr int kStateTiles = 4;  // the most tiles in work at once

struct Kernels {
  const char* name;
  // x * rsqrt(mean(x * x) + epsilon) * gain.
  void (*normalize)(const float* x, const float* gain, float epsilon, int64_t width, float* y);
  // Rounds a row of activations, whose blocks go to every `step`-th place of y; the result is its factor.
  float (*quantize)(const float* x, int64_t width, Activations* y, int64_t step);
  // Tiles first to last of the product.
  void (*project)(const Projection&, int64_t first, int64_t last);
  // Products of rows with vectors of floats, `width` a multiple of 16; y is (rows, stride).
  void (*dots)(const float* x, int64_t rows, const float* vectors, int64_t count, int64_t width, float* y,
               int64_t stride);
  void (*attend)(const Queries&);
  void (*attend_all)(const FullQueries&);
  // Each channel's sum over `taps` rows of number times weight; weights are (taps, stride).
  void (*convolve)(const float* const* rows, int64_t taps, const float* weights, int64_t stride, int64_t count,
                   float* y);
  // exp(a soft) with soft = log(1 + exp(x + bias)), which is written too, if not to null.
  void (*decay)(const float* x, const float* bias, const float* a, int64_t count, float* y, float* soft);
  void (*recur)(const Recurrence&);
  // y * gate(x).
  void (*multiply)(Gate gate, const float* x, int64_t count, float* y);
  // most * tanh(x / most); not a number where x is not finite.
  void (*cap)(const float* x, int64_t count, float most, float* y);
  // A row of a matrix in float32, times `factor`.
  void (*gather)(const Part&, int64_t inputs, int64_t row, float factor, float* y);
  // The first of the largest values, and sum(exp(x - largest)).
  void (*largest)(const float* x, int64_t count, float* value, int64_t* index);
  float (*sum_exp)(const float* x, int64_t count, float largest);
};

// The table called `name`, or for an empty name the best that this processor runs; null if there is none
// or the processor lacks it.
const Kernels* find_kernels(const char* name);

}  // namespace edgespec
