// GGUF's block formats, a block at a time: what lies where in a block (ggml-common.h), read into the
// words of which packed tiles are made.
#pragma once
#include <string>
#include <vector>

#include "linear/matrix.h"

namespace pdserve {

// 32 values of one row as words of 4 bytes: 8 of them, or 4 whose low nibbles are the first 16
// values; with their scales and minima: two where groups are of 16 values.
struct Block {
  uint32_t q[8];
  float d[2];
  float m[2];
  uint16_t half_d[2];  // the same where scales have 16 bits
  uint16_t half_m;
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
