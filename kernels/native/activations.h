// Inputs of a linear product: rows of floats, and the same rows in the encodings that weights want.
//
// Owns nothing; whoever runs a step owns the buffers, sized for it.
#pragma once
#include "common.h"

namespace pdserve {

enum Encoding : uint32_t { kFloat = 0, kInt8 = 1, kBf16 = 2 };  // a mask of what is needed beside floats

struct Activations {
  int64_t rows = 0;
  int64_t cols = 0;
  uint32_t needs = kFloat;
  const float* f32 = nullptr;  // [rows, cols]
  // kInt8: value = scale * q8; scale = largest magnitude of the block / 127. cols % 32 == 0.
  int8_t* q8 = nullptr;        // [rows, cols]
  float* scale = nullptr;      // [rows, cols / 32]
  int32_t* sum = nullptr;      // [rows, cols / 16]: of q8 over 16 columns
  // kBf16: rounded to nearest even, a row padded with 0 to an even length.
  uint16_t* bf16 = nullptr;    // [rows, round_up(cols, 2)]
};

}  // namespace pdserve
