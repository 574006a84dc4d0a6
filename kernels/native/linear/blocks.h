// GGUF's block formats, a block at a time: what lies where in a block (ggml-common.h), read into the
// words of which packed tiles are made.
#pragma once
#include <string>
#include <vector>

#include "linear/matrix.h"

namespace pdserve {

constexpr uint32_t kLowNibbles = 0x0F0F0F0F;  // of the bytes of a word

// 32 values of one row as words of 4 bytes: 8 of them, or 4 whose low nibbles are the first 16
// values; with their scales and minima, in the types of the format.
struct Block {
  uint32_t q[8];
  uint16_t d[2];       // 16 bits: of each 16 values; codes: the first is the float16 of all
  uint16_t m;          // 16 bits; codes: the float16 of all, negated
  int8_t code_d[2];    // of each 16 values; the first, if groups are of 32
  int8_t code_m[2];
};

// One stored format: a row is a run of blocks.
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

// The names of all formats.
std::vector<std::string> stored_formats();

// The format of that name. Throws std::invalid_argument with the names that exist.
const StoredFormat& stored_format(const std::string& name);

}  // namespace pdserve
