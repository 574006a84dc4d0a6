#include "decoder/head_linear.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/require.h"
#include "decoder/groups.h"

namespace pdserve {

HeadLinearPart::HeadLinearPart(std::vector<Matrix> matrices, int64_t kept)
    : matrices_(std::move(matrices)), kept_(kept) {
  require(!matrices_.empty(), "it has no matrices");
  heads_ = static_cast<int64_t>(matrices_.size());
  rows_ = matrices_[0].rows;
  cols_ = matrices_[0].cols;
  for (const Matrix& matrix : matrices_) {
    require(matrix.rows == rows_ && matrix.cols == cols_, "the matrices must have one size");
    needs_ |= encoding_of(matrix);
  }
}

int64_t HeadLinearPart::fit(int64_t inputs) {
  rest_ = inputs - heads_ * (kept_ + cols_);
  require(rest_ >= 0, "its heads have " + std::to_string(heads_ * (kept_ + cols_)) +
                          " values, a row " + std::to_string(inputs));
  return outputs();
}

void HeadLinearPart::together(const Step& step, const Rows& rows, const float* x,
                              float* y) const {
  GroupScratch& scratch = step.scratch;
  static const std::vector<float> kNoBias;
  for (int64_t begin = 0; begin < rows.count; begin += kMostGroupRows) {
    const int64_t count = std::min(kMostGroupRows, rows.count - begin), slots = heads_ * count;
    const float* from = x + begin * inputs();
    float* to = y + begin * outputs();
    // A slot is a head of a row; slots are in the order of heads, then of rows.
    float* in = scratch.inputs.at_least(slots * cols_);
    float* out = scratch.products.at_least(slots * rows_);
    int64_t* begins = scratch.begins.at_least(heads_ + 1);
    for (int64_t head = 0; head <= heads_; ++head) begins[head] = head * count;
    const Activations made = activations_of(slots, cols_, needs_, in, scratch.encodings);
    each_row(step.pool, Rows{0, slots, false}, cols_, [&](int64_t slot) {
      const int64_t head = slot / count, row = slot % count;
      const float* at = from + row * inputs() + head * (kept_ + cols_) + kept_;
      std::copy_n(at, cols_, in + slot * cols_);
      step.kernels.encode(made, slot, slot + 1);
    });
    multiply_groups(
        step, matrices_.size(), begins, made, out, rows_,
        [&](size_t head) { return std::array<const Matrix*, 1>{&matrices_[head]}; },
        [&](size_t) -> const std::vector<float>& { return kNoBias; });
    each_row(step.pool, Rows{0, count, false}, outputs(), [&](int64_t row) {
      const float* old = from + row * inputs();
      float* made_row = to + row * outputs();
      for (int64_t head = 0; head < heads_; ++head) {
        std::copy_n(old + head * (kept_ + cols_), kept_, made_row + head * (kept_ + rows_));
        std::copy_n(out + (head * count + row) * rows_, rows_,
                    made_row + head * (kept_ + rows_) + kept_);
      }
      std::copy_n(old + inputs() - rest_, rest_, made_row + outputs() - rest_);
    });
  }
}

}  // namespace pdserve
