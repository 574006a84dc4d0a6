// Weights packed once at load: tiles of 16 outputs, so that a vector holds one value of each.
//
// A tile is contiguous and tiles follow each other, so that a matrix is one stream:
//
//   | quants of block 0 | block 1 | ... | d of group 0 | group 1 | ... | m of group 0 | ... | to 64 |
//
//   block of kU4, 4 vectors of 64 bytes; vector j holds of output i (bytes 4i to 4i + 3)
//     inputs 4j to 4j + 3 in the low nibbles, 16 + 4j to 16 + 4j + 3 in the high ones
//   block of kU5: the same, and a fifth vector: bit k of its byte n belongs to byte n of the k-th
//     vector of inputs 4k to 4k + 3
//   block of kU8, 8 vectors; vector j holds of output i its inputs 4j to 4j + 3
//   d, m: a vector of 16 outputs, float16 or float32; m only where has_minima
//   kBf16: a vector for each pair of inputs, output i's pair in bytes 4i to 4i + 3
//   kF16, kF32: a vector of 16 outputs for each input
//
// Owns its memory, together with its neighbours (base/arena.h).
#pragma once
#include <memory>

#include "base/common.h"

namespace pdserve {

// How a packed weight is stored and what it means; d is the scale of its group, m the minimum.
enum class Layout : int {
  kU4,    // 4 bits: d * (q - offset), or d * q + m
  kU5,    // 5 bits: the same
  kU8,    // 8 bits: the same
  kBf16,  // pairs of inputs side by side
  kF16,   // one vector of 16 outputs an input
  kF32,
};

// Bits of a quantized weight; 0 if the layout holds numbers.
constexpr int quant_bits(Layout layout) {
  return layout == Layout::kU4 ? 4 : layout == Layout::kU5 ? 5 : layout == Layout::kU8 ? 8 : 0;
}

struct Matrix {
  Layout layout = Layout::kF32;
  int64_t rows = 0;           // outputs; the last tile is padded with weights of 0
  int64_t cols = 0;           // inputs
  int group = 32;             // of quants: inputs that share d and m; 32, or 16 (kU8 only)
  bool wide_scales = false;   // d and m are float32, else float16
  bool has_minima = false;    // m is stored, and offset is 0
  int offset = 0;             // subtracted from q
  int64_t tile_bytes = 0;     // a multiple of 64
  int64_t scales_at = 0;      // offset in a tile of d [groups][16]
  int64_t minima_at = 0;      // offset in a tile of m [groups][16]
  std::shared_ptr<uint8_t> data;  // 64-byte aligned [tiles][tile_bytes]

  int64_t tiles() const { return ceil_div(rows, kLanes); }
  int64_t bytes() const { return tiles() * tile_bytes; }
};

}  // namespace pdserve
