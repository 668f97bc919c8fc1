// The layout of matrices and activations in memory, the same for every instruction set.
//
// A matrix is cut into tiles of 16 rows ("columns" of the product, one for each lane) by 32 or 256 inputs,
// the block of its format; tiles follow each other along the inputs, then down the rows. Four inputs that
// follow each other are a group. Codes lie in lines of 64 bytes: byte 4 * lane + i is input i of a group of
// that lane, so that one 32-bit broadcast of four activations meets all lanes. Weights are
//
//     scale * (code - zero) - minimum
//
// with the codes, scales and minimums of the GGUF file, at its bits per weight. In a format with a table the file's
// code is an index, and the code is the table's entry.
#pragma once

#include <cstdint>

namespace edgespec {

constexpr int kLanes = 16;   // rows of a matrix in a tile
constexpr int kBlock = 32;   // inputs of a block of codes
constexpr int kShare = 16;   // inputs that share a scale of activations
constexpr int kGroups = 8;   // groups of four in such a block
constexpr int kLine = 64;    // bytes

// 32 activations, rounded to 8 bits. An activation is the row's factor, a float, times a whole number for 16 of them,
// times its code. So a product of 32 activations with codes of weights is a whole number. Every set of instructions
// may compute it in its own way, also in floats if they hold it exactly.
struct Activations {
  int8_t codes[kBlock];
  int16_t scales[2];            // 0 to 255: of the first 16 and of the others
  int32_t twice[2];             // the same in both halves of 32 bits
  float floats[2];              // the same
  int32_t negated_sums[2];      // minus the sum of the codes
  int16_t negated_pairs[2][2];  // minus the sums of each group's first two codes, and of its last two
  float negated_sum;            // minus the sum of scale * code
};
static_assert(sizeof(Activations) == 72);
constexpr int kMostScale = 255, kMostCode = 127;

// The facts of formats. A tile has `kSubBlocks` blocks of 32 inputs.
//
//     kBits      of a code in lines that hold two groups (4 bits) or four (2 bits) or one (8 bits) each
//     kHighBits  above them, in further lines: 1 bit of all 8 groups, or 2 bits of 4 groups
//     kScales    scales of a block: 1, or 2 of 16 inputs each
//     kTable     codes, which the bits choose from; no distance to kZero is above kZero
//     kUnit      a further factor of every scale
//
// The scale of a block is a float16, a power of two by its exponent, or a float16 of the tile times a number:
// a whole one, or a float of 8 bits without a sign, 4 of them its exponent.
enum class Scale { half, exponent, bytes, signed_bytes, nibbles, small_floats };

struct Q4_0 {
  static constexpr int kBits = 4, kHighBits = 0, kSubBlocks = 1, kScales = 1, kZero = 8;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = false;
};
struct Q4_1 {
  static constexpr int kBits = 4, kHighBits = 0, kSubBlocks = 1, kScales = 1, kZero = 0;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = true;
};
struct Q5_0 {
  static constexpr int kBits = 4, kHighBits = 1, kSubBlocks = 1, kScales = 1, kZero = 16;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = false;
};
struct Q5_1 {
  static constexpr int kBits = 4, kHighBits = 1, kSubBlocks = 1, kScales = 1, kZero = 0;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = true;
};
struct Q8_0 {
  static constexpr int kBits = 8, kHighBits = 0, kSubBlocks = 1, kScales = 1, kZero = 128;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = false;
};
struct Q2_K {
  static constexpr int kBits = 2, kHighBits = 0, kSubBlocks = 8, kScales = 2, kZero = 0;
  static constexpr Scale kScale = Scale::nibbles;
  static constexpr bool kMinimums = true;
};
struct Q3_K {
  static constexpr int kBits = 2, kHighBits = 1, kSubBlocks = 8, kScales = 2, kZero = 4;
  static constexpr Scale kScale = Scale::signed_bytes;
  static constexpr bool kMinimums = false;
};
struct Q4_K {
  static constexpr int kBits = 4, kHighBits = 0, kSubBlocks = 8, kScales = 1, kZero = 0;
  static constexpr Scale kScale = Scale::bytes;
  static constexpr bool kMinimums = true;
};
struct Q5_K {
  static constexpr int kBits = 4, kHighBits = 1, kSubBlocks = 8, kScales = 1, kZero = 0;
  static constexpr Scale kScale = Scale::bytes;
  static constexpr bool kMinimums = true;
};
struct Q6_K {
  static constexpr int kBits = 4, kHighBits = 2, kSubBlocks = 8, kScales = 2, kZero = 32;
  static constexpr Scale kScale = Scale::signed_bytes;
  static constexpr bool kMinimums = false;
};
struct IQ4_NL {
  static constexpr int kBits = 4, kHighBits = 0, kSubBlocks = 1, kScales = 1, kZero = 128;
  static constexpr Scale kScale = Scale::half;
  static constexpr bool kMinimums = false;
  static constexpr uint8_t kTable[] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct IQ4_XS : IQ4_NL {
  static constexpr int kSubBlocks = 8;
  static constexpr Scale kScale = Scale::signed_bytes;
};
struct MXFP4 {
  static constexpr int kBits = 4, kHighBits = 0, kSubBlocks = 1, kScales = 1, kZero = 12;
  static constexpr Scale kScale = Scale::exponent;
  static constexpr bool kMinimums = false;
  static constexpr uint8_t kTable[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};
struct IQ2_XS : Q3_K {
  static constexpr int kZero = 128;
  static constexpr float kUnit = 0.125f;
  static constexpr uint8_t kTable[16] = {85, 103, 120, 136, 153, 171};
};
struct IQ3_XXS : IQ4_XS {
  static constexpr int kZero = 31;
  static constexpr float kUnit = 0.5f;
  static constexpr uint8_t kTable[] = {0, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 62};
};
struct IQ3_S : IQ4_XS {
  static constexpr int kZero = 16;
  static constexpr uint8_t kTable[] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
};
struct NVFP4 : MXFP4 {
  static constexpr int kSubBlocks = 2, kScales = 2;
  static constexpr Scale kScale = Scale::small_floats;
  static constexpr float kUnit = 0.00048828125f;  // 2 to the -11: a matrix's own factor is small
};

// The parts of a tile: low bits, high bits, scales and minimums of blocks, then factors: float16, or exponents in a
// byte.
template <class Format>
struct Tile {
  static constexpr int kInputs = kBlock * Format::kSubBlocks;
  static constexpr int kLowLines = Format::kBits;  // of a block: 8 groups of 4 inputs, 16 lanes
  static constexpr int kHighLines = Format::kHighBits;
  static constexpr bool kExponents = Format::kScale == Scale::exponent;
  static constexpr bool kFactorIsScale = Format::kScale == Scale::half || kExponents;
  static constexpr int kScaleBytes = kFactorIsScale ? 0 : Format::kScales * kLanes;  // of a block
  static constexpr bool kByteMinimums = Format::kMinimums && Format::kScale == Scale::bytes;
  static constexpr int kHigh = Format::kSubBlocks * kLowLines * kLine;
  static constexpr int kScaleAt = kHigh + Format::kSubBlocks * kHighLines * kLine;
  static constexpr int kMinimumAt = kScaleAt + Format::kSubBlocks * kScaleBytes;
  static constexpr int kFactorAt = kMinimumAt + (kByteMinimums ? Format::kSubBlocks * kScaleBytes : 0);
  static constexpr int kBytes = kFactorAt + (Format::kMinimums ? 4 : kExponents ? 1 : 2) * kLanes;
};
static_assert(Tile<Q4_0>::kBytes == 288 && Tile<Q4_1>::kBytes == 320 && Tile<Q5_0>::kBytes == 352);
static_assert(Tile<Q5_1>::kBytes == 384 && Tile<Q8_0>::kBytes == 544 && Tile<Q2_K>::kBytes == 1344);
static_assert(Tile<Q3_K>::kBytes == 1824 && Tile<Q4_K>::kBytes == 2368 && Tile<Q5_K>::kBytes == 2880);
static_assert(Tile<Q6_K>::kBytes == 3360 && Tile<IQ4_NL>::kBytes == 288 && Tile<IQ4_XS>::kBytes == 2208);
static_assert(Tile<MXFP4>::kBytes == 272 && Tile<IQ2_XS>::kBytes == 1824 && Tile<IQ3_XXS>::kBytes == 2208);
static_assert(Tile<IQ3_S>::kBytes == 2208 && Tile<NVFP4>::kBytes == 608);

// In the order of the tables of functions.
#define EDGESPEC_FORMATS(X) \
  X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) \
  X(IQ2_XS) X(IQ3_XXS) X(IQ3_S) X(NVFP4)

// The largest code of a format, and the largest distance of a code from zero's.
template <class Format>
constexpr int kLargestCode =
    requires { Format::kTable; } ? 2 * Format::kZero : (1 << (Format::kBits + Format::kHighBits)) - 1;
template <class Format>
constexpr int kReach = Format::kZero < kLargestCode<Format> - Format::kZero ? kLargestCode<Format> - Format::kZero
                                                                           : Format::kZero;
// The largest sum of 16 products of (code - zero). If it fits 16 bits and a sign, its product with a scale fits a
// float. All codes but 8-bit ones do.
template <class Format>
constexpr int kMostDot = kReach<Format> * kMostCode * kShare;
template <class Format>
constexpr bool kFits = kMostDot<Format> <= 65535;
static_assert(65535 * kMostScale <= 1 << 24);
#define EDGESPEC_HOLDS(name) \
  static_assert(kFits<name> ? 2 * kLargestCode<name> * kMostCode <= 32767 : name::kZero == 128);
EDGESPEC_FORMATS(EDGESPEC_HOLDS)  // a pair of products fits 16 bits; wide codes are made signed by subtracting 128
#undef EDGESPEC_HOLDS

struct FormatInfo {
  const char* name;
  int inputs;  // of a tile
  int bytes;
};
#define EDGESPEC_INFO(name) {#name, Tile<name>::kInputs, Tile<name>::kBytes},
constexpr FormatInfo kFormats[] = {EDGESPEC_FORMATS(EDGESPEC_INFO)};
#undef EDGESPEC_INFO
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

}  // namespace edgespec
