// What an instruction set offers the operators: a table of functions. Every table computes the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "half.h"
#include "layout.h"

namespace edgespec {

// Rows of a projection that share a format.
struct Part {
  const uint8_t* tiles;
  int64_t columns;  // of the product
  int format;

  int64_t tile_count() const { return (columns + kLanes - 1) / kLanes; }
  size_t bytes(int64_t inputs) const {
    const FormatInfo& known = kFormats[format];
    return static_cast<size_t>(tile_count() * (inputs / known.inputs) * known.bytes);
  }
};

enum class Gate { none, silu, gelu };

// A projection of `rows` rows. With a gate the first half of the parts is what goes through the activation,
// and the second half, part for part as wide, what it multiplies.
struct Projection {
  const Part* parts;
  int64_t part_count;
  int64_t inputs;
  Gate gate;
  int64_t width;  // columns of y
  int64_t rows;
  const Activations* activations;  // (rows, inputs / 32)
  const float* factors;            // (rows), of the activations
  const float* bias;               // (width), or null
  const float* residual;           // (rows, width), or null: added
  float* y;                        // (rows, width)
};

// Attention of one query head.
struct HeadAttention {
  const float* queries;  // (rows, head_dim): rotated and scaled
  const Half* keys;      // (capacity / 16, head_dim, 16)
  const Half* values;    // (capacity, head_dim)
  int64_t head_dim;
  int64_t past;    // tokens before the first row
  int64_t rows;
  int64_t window;  // tokens a row attends to, itself included; 0: all
  float* scratch;  // see attention_scratch
  float* y;        // (rows, stride)
  int64_t stride;
};

constexpr int64_t kAttentionRows = 8;

inline int64_t attention_scratch(int64_t tokens) {
  return kAttentionRows * (tokens + kLanes);
}

struct Kernels {
  const char* name;
  // x * rsqrt(mean(x * x) + epsilon) * gain.
  void (*normalize)(const float* x, const float* gain, float epsilon, int64_t width, float* y);
  // Rounds a row of activations; the result is its factor.
  float (*quantize)(const float* x, int64_t width, Activations* y);
  // Tiles first to last of the product.
  void (*project)(const Projection&, int64_t first, int64_t last);
  void (*attend)(const HeadAttention&);
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
