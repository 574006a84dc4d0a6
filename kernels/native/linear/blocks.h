// GGUF's block formats (ggml-common.h), read block by block into the words of packed tiles.
#pragma once
#include <string>
#include <vector>

#include "linear/matrix.h"

namespace pdserve {

constexpr uint32_t kLowNibbles = 0x0F0F0F0F;  // of the bytes of a word

// 32 values of one row, as 8 words of 4 bytes, or as 4 words whose low nibbles are the first 16
// values; with scales and minima in the types of the format.
struct Block {
  uint32_t q[8];
  uint16_t d[2];       // 16-bit scales, per 16 values; kCodes: d[0] is the float16 of all
  uint16_t m;          // 16-bit minimum; kCodes: the float16 of all, negated
  int8_t code_d[2];    // of each 16 values; only the first for groups of 32
  int8_t code_m[2];
};

// A stored format; a row is a run of blocks.
struct StoredFormat {
  const char* name;  // GGUF's
  int64_t block_values;
  int64_t block_bytes;
  Layout layout;
  int group;
  Scales scales;
  bool has_minima;
  void (*read)(const uint8_t* row, int64_t b, Block& out);  // the b-th 32 values; null: numbers
};

// Returns the names of all formats.
std::vector<std::string> stored_formats();

// Returns a format by name. Throws std::invalid_argument with the known names.
const StoredFormat& stored_format(const std::string& name);

}  // namespace pdserve
