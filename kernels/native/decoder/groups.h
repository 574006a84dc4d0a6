// Products of rows in groups, each group with matrices of its own: experts, heads. The rows of all
// groups are divided over the threads together; no result depends on how.
#pragma once
#include <algorithm>
#include <vector>

#include "base/buffer.h"
#include "decoder/part.h"
#include "linear/linear.h"

namespace pdserve {

// body(row) for every row of so many values, some at a time.
template <class Body>
void spread_rows(Pool& pool, int64_t rows, int64_t values, const Body& body) {
  constexpr int64_t kRowsPerPiece = 4;
  constexpr int64_t kInline = 16384;  // values below which rows are not worth waking helpers for
  if (rows * values <= kInline) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  pool.run(ceil_div(rows, kRowsPerPiece), [&](int64_t piece, int) {
    const int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece);
    for (int64_t row = piece * kRowsPerPiece; row < end; ++row) body(row);
  });
}

// Rows of values [rows, cols] with memory for their encodings.
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

// y[slot] = x[slot] times the matrices of its group, whose slots are [begins[g], begins[g + 1]). The
// tiles of all groups that have slots are numbered through and divided over the threads.
template <class MatricesOf, class BiasOf>
void multiply_groups(const Step& step, size_t groups, const int64_t* begins, const Activations& x,
                     float* y, int64_t stride, const MatricesOf& matrices_of,
                     const BiasOf& bias_of) {
  constexpr int64_t kPiecesPerThread = 4;  // groups have unlike many rows
  int64_t total = 0;
  for (size_t g = 0; g < groups; ++g) {
    const auto matrices = matrices_of(g);
    if (begins[g] < begins[g + 1]) {
      total += total_tiles(matrices.data(), static_cast<int>(matrices.size()));
    }
  }
  const int64_t wanted = step.pool.threads() * kPiecesPerThread;
  const int64_t size = round_up(ceil_div(total, wanted), 4);  // tiles are read four at a time
  step.pool.run(ceil_div(total, size), [&](int64_t piece, int) {
    int64_t begin = piece * size, end = std::min(total, begin + size);
    for (size_t g = 0; g < groups && end > 0; ++g) {  // begin and end are relative to group g
      const int64_t first = begins[g], count = begins[g + 1] - first;
      if (count == 0) continue;
      const auto matrices = matrices_of(g);
      const int num = static_cast<int>(matrices.size());
      const int64_t tiles = total_tiles(matrices.data(), num);
      const std::vector<float>& bias = bias_of(g);
      if (begin < tiles) {
        linear_here(step.kernels, matrices.data(), num, rows_of(x, first, count),
                    std::max<int64_t>(0, begin), std::min(tiles, end), y + first * stride, stride,
                    bias.empty() ? nullptr : bias.data());
      }
      begin -= tiles;
      end -= tiles;
    }
  });
}

}  // namespace pdserve
