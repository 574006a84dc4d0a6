#include "linear/linear.h"

#include <algorithm>

namespace pdserve {

namespace {

constexpr int64_t kEncodedTogether = 1 << 14;  // values; smaller pieces are not worth a helper
constexpr int64_t kInt8Tiles = 2, kFloatTiles = 4;  // the widest register tiles

int64_t num_int8(const Activations& x) { return x.needs & kInt8 ? x.rows * (x.cols / kBlock) : 0; }

}  // namespace

Activations rows_of(Activations x, int64_t begin, int64_t count) {
  x.rows = count;
  if (x.f32) x.f32 += begin * x.cols;
  if (x.needs & kInt8) x.int8 += begin * (x.cols / kBlock);
  if (x.needs & kBf16) x.bf16 += begin * round_up(x.cols, 2);
  return x;
}

int64_t total_tiles(const Matrix* const* matrices, int count) {
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) tiles += matrices[i]->tiles();
  return tiles;
}

uint32_t encoding_of(const Matrix& m) {
  switch (m.layout) {
    case Layout::kU4:
    case Layout::kU5:
    case Layout::kU8:
    case Layout::kU2:
    case Layout::kU3:
    case Layout::kU6:
    case Layout::kFp4:
    case Layout::kIq4:
      return kInt8;
    case Layout::kBf16:
      return kBf16;
    case Layout::kF8:
    case Layout::kF16:
    case Layout::kF32:
      break;
  }
  return kFloat;
}

int64_t encoding_bytes(const Activations& x) {
  return num_int8(x) * static_cast<int64_t>(sizeof(Int8Block)) +
         (x.needs & kBf16 ? x.rows * round_up(x.cols, 2) * 2 : 0);
}

void place(Activations& x, void* buffer) {
  x.int8 = static_cast<Int8Block*>(buffer);
  x.bf16 = reinterpret_cast<uint16_t*>(x.int8 + num_int8(x));
}

void copy_encodings(const Activations& from, int64_t from_row, const Activations& to,
                    int64_t to_row) {
  if (from.needs & kInt8) {
    const int64_t blocks = from.cols / kBlock;
    std::copy_n(from.int8 + from_row * blocks, blocks, to.int8 + to_row * blocks);
  }
  if (from.needs & kBf16) {
    const int64_t values = round_up(from.cols, 2);
    std::copy_n(from.bf16 + from_row * values, values, to.bf16 + to_row * values);
  }
}

void run_encode(Pool& pool, const Kernels& kernels, const Activations& x) {
  if (x.needs == kFloat || x.rows == 0) return;
  int64_t step = std::max<int64_t>(1, kEncodedTogether / std::max<int64_t>(1, x.cols));
  pool.run(ceil_div(x.rows, step), [&](int64_t piece, int) {
    kernels.encode(x, piece * step, std::min(x.rows, (piece + 1) * step));
  });
}

void linear_here(const Kernels& kernels, const Matrix* const* matrices, int count,
                 const Activations& x, int64_t begin, int64_t end, float* y, int64_t stride,
                 const float* bias) {
  for (int i = 0; i < count && end > 0; ++i) {  // begin and end are relative to matrix i
    const Matrix& m = *matrices[i];
    const int64_t first = std::max<int64_t>(0, begin), last = std::min(m.tiles(), end);
    if (first < last) {
      kernels.linear(m, x, y, stride, first, last);
      if (bias) {
        const int64_t from = first * kLanes, to = std::min(m.rows, last * kLanes);
        for (int64_t r = 0; r < x.rows; ++r) {
          kernels.add_bias(y + r * stride + from, bias + from, to - from);
        }
      }
    }
    begin -= m.tiles();
    end -= m.tiles();
    y += m.rows;
    if (bias) bias += m.rows;
  }
}

void run_linear(Pool& pool, const Kernels& kernels, const Matrix* const* matrices, int count,
                const Activations& x, float* y, int64_t stride, const float* bias) {
  const int64_t tiles = total_tiles(matrices, count);
  if (tiles == 0 || x.rows == 0) return;
  // Each thread reads one stream of weights. More pieces would balance better, but the beginning of
  // a piece is not prefetched.
  const int64_t wanted = pool.threads();
  const int64_t step = round_up(ceil_div(tiles, wanted), x.needs & kInt8 ? kInt8Tiles : kFloatTiles);
  const int64_t ranges = ceil_div(tiles, step);
  // If there are fewer pieces than threads, the rows are also divided.
  const int64_t cuts = std::clamp<int64_t>(wanted / ranges, 1, ceil_div(x.rows, 64));
  const int64_t row_step = ceil_div(x.rows, cuts);
  pool.run(ranges * ceil_div(x.rows, row_step), [&](int64_t piece, int) {
    const int64_t row = piece / ranges * row_step, begin = piece % ranges * step;
    linear_here(kernels, matrices, count, rows_of(x, row, std::min(row_step, x.rows - row)), begin,
                begin + step, y + row * stride, stride, bias);
  });
}

}  // namespace pdserve
