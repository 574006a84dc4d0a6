// Converts tensors in file formats to a packed Matrix.
//
// Values never change: each format has a layout that represents it exactly.
#pragma once
#include "linear/blocks.h"
#include "threads/pool.h"

namespace pdserve {

// Packs `bytes`, which hold rows * cols / block_values blocks. Reads every byte once and packs
// tiles in parallel. Throws std::invalid_argument if sizes do not match, and std::bad_alloc.
Matrix pack(Pool& pool, const StoredFormat& format, const uint8_t* bytes, int64_t num_bytes,
            int64_t rows, int64_t cols);

// Levels with one scale per group of columns, row by row.
struct Grouped {
  Layout layout;         // kU4, kU8, kF8 or kFp4
  int64_t rows, cols, groups;
  const uint8_t* codes;  // [rows, cols * bits / 8]; for 4 bits, the first is the low nibble
  Scales scales;         // the type of d; kE4m3 for kFp4 and only for it
  const uint8_t* d;      // [rows, groups]
  const uint8_t* zeros;  // [rows, groups], or null: offset_of(layout)
  const float* divisors; // kFp4: [rows], divisors of all d of a row
};

// Packs grouped levels. Groups of integers are multiples of 32 columns (8-bit integers without
// zeros may also have an even number of groups of 16), groups of 8-bit floats have any size, and
// 4-bit floats have an even number of groups of 16. Throws std::invalid_argument if sizes do not
// match, an 8-bit float is NaN, a scale is not finite (8-bit floats: not below 2^119), or a divisor
// is not finite or below 2^-116. Throws std::bad_alloc.
Matrix pack_groups(Pool& pool, const Grouped& from);

}  // namespace pdserve
