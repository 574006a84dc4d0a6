// Products of rows in groups that have separate matrices: experts, heads. The rows of all groups
// are divided over the threads together; the division affects no result.
#pragma once
#include <algorithm>
#include <vector>

#include "base/buffer.h"
#include "decoder/part.h"
#include "linear/linear.h"

namespace pdserve {

constexpr int64_t kMostGroupRows = 256;  // per piece of work, to bound the scratch memory

struct Choice;  // of an expert; defined in experts.h

// Memory of products in groups. A stack owns one for all its layers, and the next part overwrites
// the content. A slot is a row in one of its groups.
struct GroupScratch {
  Buffer<int64_t> begins;     // the first slot of each group
  Buffer<float> inputs, products;
  Buffer<uint8_t> encodings;  // of the slots' inputs

  // Used by experts only.
  Buffer<float> logits, choosing, middles, results, shared;
  Buffer<uint8_t> row_encodings, middle_encodings;
  Buffer<Choice> chosen;
  Buffer<int64_t> slot_of, row_of;
};

// Returns rows of values [rows, cols] with memory for their encodings.
inline Activations activations_of(int64_t rows, int64_t cols, uint32_t needs, const float* values,
                                  Buffer<uint8_t>& encodings) {
  Activations made;
  made.rows = rows;
  made.cols = cols;
  made.needs = needs;
  made.f32 = values;
  place(made, encodings.at_least(std::max<int64_t>(1, encoding_bytes(made))));
  return made;
}

// Tiles of one group.
struct TileRange {
  int64_t begin, end;
};

// Returns the tiles of a group that cover the costs [begin, end), relative to the group's first
// tile. Bounds are rounded up to multiples of four tiles, which are read together.
inline TileRange tiles_between(int64_t begin, int64_t end, int64_t tile_cost, int64_t tiles) {
  const auto at = [&](int64_t cost) {
    return std::min(tiles, round_up(ceil_div(std::max<int64_t>(0, cost), tile_cost), 4));
  };
  return {at(begin), at(end)};
}

// y[slot] = x[slot] times the matrices of its group, whose slots are [begins[g], begins[g + 1]).
// The consecutive tiles of all groups with slots are divided into pieces of similar cost.
template <class MatricesOf, class BiasOf>
void multiply_groups(const Step& step, size_t groups, const int64_t* begins, const Activations& x,
                     float* y, int64_t stride, const MatricesOf& matrices_of,
                     const BiasOf& bias_of) {
  constexpr int64_t kPiecesPerThread = 4;
  constexpr int64_t kReading = 4;  // cost of reading a tile, in products with it
  const auto tiles_of = [&](size_t g) {
    const auto matrices = matrices_of(g);
    return total_tiles(matrices.data(), static_cast<int>(matrices.size()));
  };
  const auto tile_cost = [&](size_t g) { return begins[g + 1] - begins[g] + kReading; };
  int64_t total = 0;
  for (size_t g = 0; g < groups; ++g) {
    if (begins[g] < begins[g + 1]) total += tiles_of(g) * tile_cost(g);
  }
  if (total == 0) return;
  const int64_t size = ceil_div(total, step.pool.threads() * kPiecesPerThread);
  step.pool.run(ceil_div(total, size), [&](int64_t piece, int) {
    int64_t begin = piece * size, end = begin + size;
    for (size_t g = 0; g < groups && end > 0; ++g) {  // begin and end are relative to group g
      const int64_t first = begins[g], count = begins[g + 1] - first;
      if (count == 0) continue;
      const int64_t tiles = tiles_of(g), cost = tile_cost(g);
      const TileRange range = tiles_between(begin, end, cost, tiles);
      if (range.begin < range.end) {
        const auto matrices = matrices_of(g);
        const std::vector<float>& bias = bias_of(g);
        linear_here(step.kernels, matrices.data(), static_cast<int>(matrices.size()),
                    rows_of(x, first, count), range.begin, range.end, y + first * stride, stride,
                    bias.empty() ? nullptr : bias.data());
      }
      begin -= tiles * cost;
      end -= tiles * cost;
    }
  });
}

}  // namespace pdserve
