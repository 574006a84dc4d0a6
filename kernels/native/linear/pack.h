// From a tensor as files store it to a packed Matrix.
//
// No value changes: each format has a layout that holds it exactly.
#pragma once
#include "linear/blocks.h"
#include "threads/pool.h"

namespace pdserve {

// The packed form of `bytes`: rows times cols / block_values blocks. Every byte is read once, tiles
// are packed in parallel. Throws std::invalid_argument if sizes do not fit, std::bad_alloc.
Matrix pack(Pool& pool, const StoredFormat& format, const uint8_t* bytes, int64_t num_bytes,
            int64_t rows, int64_t cols);

// Levels with a scale for each group of columns, row by row.
struct Grouped {
  Layout layout;         // kU4, kU8, kF8 or kFp4
  int64_t rows, cols, groups;
  const uint8_t* codes;  // [rows, cols * bits / 8]; of 4 bits the first is the low nibble
  Scales scales;         // the type of d; of kFp4 kE4m3, and only of it
  const uint8_t* d;      // [rows, groups]
  const uint8_t* zeros;  // [rows, groups], or null: offset_of(layout)
  const float* divisors; // kFp4: [rows], what all d of a row are divided by
};

// Its packed form. Groups of integers are multiples of 32 columns (of 8 bits without zeros also 16,
// an even number of them), those of 8-bit floats any, those of 4-bit floats 16 and an even number.
// Throws std::invalid_argument if sizes do not fit, an 8-bit float is NaN, a scale is not finite
// (of 8-bit floats: not below 2^119), or a divisor is not finite or below 2^-116; std::bad_alloc.
Matrix pack_groups(Pool& pool, const Grouped& from);

}  // namespace pdserve
