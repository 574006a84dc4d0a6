// Products of heads, each with a separate matrix.
#pragma once
#include "decoder/part.h"

namespace pdserve {

// A row begins with one head per matrix. The first `kept` values of a head stay; the head's matrix
// replaces the others by its outputs. The values after the heads stay.
class HeadLinearPart : public Part {
 public:
  static constexpr const char* kKind = "head_linear";
  // Throws std::invalid_argument if the matrices differ in size.
  HeadLinearPart(std::vector<Matrix> matrices, int64_t kept);

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step&, const Rows&, int64_t, const float*, float*) const override {}
  bool ends_pass() const override { return true; }
  void together(const Step& step, const Rows& rows, const float* x, float* y) const override;
  bool wants_all_rows() const override { return true; }  // the threads share the heads

 private:
  int64_t inputs() const { return heads_ * (kept_ + cols_) + rest_; }
  int64_t outputs() const { return heads_ * (kept_ + rows_) + rest_; }

  std::vector<Matrix> matrices_;
  int64_t kept_, heads_, rows_, cols_, rest_ = 0;
  uint32_t needs_ = kFloat;
};

}  // namespace pdserve
