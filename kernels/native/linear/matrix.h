// Weights packed once at load in tiles of 16 outputs, so that a vector holds one value per output.
//
// Tiles are contiguous and consecutive, so that a matrix is one stream:
//
//   | quants of block 0 | block 1 | ... | d of group 0 | group 1 | ... | m of group 0 | ... | factors |
//
//   block of kU4: 4 vectors of 64 bytes; bytes 4i to 4i + 3 of vector j belong to output i and hold
//     inputs 4j to 4j + 3 in the low nibbles, 16 + 4j to 16 + 4j + 3 in the high nibbles
//   block of kU5: the same and a fifth vector; bit k of its byte n belongs to byte n of the k-th
//     vector, that of inputs 4k to 4k + 3
//   block of kU8: 8 vectors; vector j holds inputs 4j to 4j + 3 of output i
//   block of kU6: like kU4 and two more vectors; bits 2k and 2k + 1 of byte n of the first belong
//     to byte n of the k-th vector, that of inputs 4k to 4k + 3; those of the second to 4 + k
//   block of kU2: two such vectors; of kU3: these and a vector of third bits, like kU5's fifth bits
//   block of kFp4 and kIq4: like kU4; each nibble is the index of one of 16 levels
//   kF8: a vector of 16 outputs per input, no blocks
//   d: a vector of 16 outputs in the type of the scales; m: the same, or -z as float16
//   kBf16: a vector per pair of inputs; output i's pair is in bytes 4i to 4i + 3
//   kF16, kF32: a vector of 16 outputs per input
//
// A matrix shares ownership of its memory with adjacent matrices (base/arena.h).
#pragma once
#include <memory>

#include "base/common.h"

namespace pdserve {

// The storage and the meaning of a packed weight; d is the scale of its group, m the minimum, z the
// zero point.
enum class Layout : int {
  kU4,    // 4 bits: d * (q - offset), d * q + m, or d * (q - z)
  kU5,    // 5 bits: the same
  kU8,    // 8 bits: the same
  kU2,    // 2, 3 and 6 bits: the same
  kU3,
  kU6,
  kFp4,   // 4 bits: d * (kFp4Levels[q] - offset)
  kIq4,   // 4 bits: d * (kIq4Levels[q] - offset)
  kF8,    // 8-bit floats (e4m3): d * q
  kBf16,  // adjacent pairs of inputs
  kF16,   // one vector of 16 outputs per input
  kF32,
};

// Returns the bits of a quantized weight; 0 if the layout holds numbers.
constexpr int quant_bits(Layout layout) {
  switch (layout) {
    case Layout::kU4:
    case Layout::kFp4:
    case Layout::kIq4: return 4;
    case Layout::kU5: return 5;
    case Layout::kU8: return 8;
    case Layout::kU2: return 2;
    case Layout::kU3: return 3;
    case Layout::kU6: return 6;
    case Layout::kF8:
    case Layout::kBf16:
    case Layout::kF16:
    case Layout::kF32: break;
  }
  return 0;
}

// Returns the offset that is subtracted from levels with neither minima nor zero points.
constexpr int offset_of(Layout layout) {
  return layout == Layout::kFp4 ? 16 : layout == Layout::kIq4 ? 128 : 1 << quant_bits(layout) >> 1;
}

// 4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), doubled, plus 16.
constexpr uint8_t kFp4Levels[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
// The levels of GGUF's IQ4 formats, plus 128.
constexpr uint8_t kIq4Levels[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                    129, 141, 153, 166, 181, 197, 217, 241};

// The type of d and of m.
enum class Scales : int {
  kF16,
  kBf16,
  kF32,
  kCodes,  // int8 times a float16 per 256 columns
  kE4m3,   // 8-bit floats divided by a float32 per output
};

constexpr int scale_bytes(Scales scales) {
  switch (scales) {
    case Scales::kF32: return 4;
    case Scales::kF16:
    case Scales::kBf16: return 2;
    case Scales::kCodes:
    case Scales::kE4m3: break;
  }
  return 1;
}

constexpr int64_t kSuper = 256;  // columns that share the second factor of kCodes

// The term added per unit of an input, in addition to the group's levels times its scale.
enum class Addend : int {
  kNone,     // an offset of the layout
  kMinima,   // m, of the type of the scales
  kZeros,    // -d * z; -z is stored, as float16
};

// Division by multiplication: b / n for blocks and groups whose product is below 2^32.
constexpr int64_t group_step(int64_t blocks_of_group) {
  return (int64_t{1} << 32) / blocks_of_group + (blocks_of_group > 1 ? 1 : 0);
}
constexpr int64_t group_of(int64_t block, int64_t step) { return block * step >> 32; }

struct Matrix {
  Layout layout = Layout::kF32;
  int64_t rows = 0;           // outputs; the last tile is padded with weights of 0
  int64_t cols = 0;           // inputs
  int64_t group = 32;         // inputs that share d; 0 if the layout has none
  int64_t group_step = pdserve::group_step(1);  // groups of 32 or more: see group_of
  Scales scales = Scales::kF16;
  Addend addend = Addend::kNone;
  int offset = 0;             // subtracted from a level: offset_of(layout), or 0
  int64_t tile_bytes = 0;     // a multiple of 64
  int64_t scales_at = 0;      // offset in a tile of d [groups][16]
  int64_t minima_at = 0;      // offset in a tile of m [groups][16]
  int64_t factors_at = 0;     // kCodes: of float16 [cols / 256][16] for d, then for m; kE4m3: [16]
  std::shared_ptr<uint8_t> data;  // 64-byte aligned [tiles][tile_bytes]

  int64_t tiles() const { return ceil_div(rows, kLanes); }
  int64_t bytes() const { return tiles() * tile_bytes; }
};

}  // namespace pdserve
