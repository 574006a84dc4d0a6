// Inputs of a linear product: rows of floats, and the same rows in the encodings of products.
//
// Owns nothing; the code that runs a step owns the buffers and sizes them (linear.h).
#pragma once
#include "base/common.h"

namespace pdserve {

// Bits of a mask: the encodings that a product needs in addition to the floats.
enum Encoding : uint32_t { kFloat = 0, kInt8 = 1, kBf16 = 2 };

// 32 columns of a row: value = scale * q. One record holds all data of a block, so that a row is
// one stream with one pointer.
struct Int8Block {
  int8_t q[kBlock];
  float scale;           // largest magnitude / 127
  float scaled_sum;      // scale * (sum of q): the factor of a weight's minimum
  int32_t minus_sum;     // -(sum of q)
  int32_t minus_half;    // -(sum of the first 16)
};

struct Activations {
  int64_t rows = 0;
  int64_t cols = 0;
  uint32_t needs = kFloat;
  const float* f32 = nullptr;  // [rows, cols]
  Int8Block* int8 = nullptr;   // kInt8: [rows, cols / 32]; cols is a multiple of 32
  uint16_t* bf16 = nullptr;    // kBf16: rounded to nearest even, [rows, round_up(cols, 2)]
};

}  // namespace pdserve
