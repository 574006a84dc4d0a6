// The kinds of parts that layers consist of. A new kind is a class here (or, if it is long, in a
// separate file in this folder) and a row of the table in bind/parts.cpp.
#pragma once
#include "attention/attention.h"
#include "decoder/part.h"

namespace pdserve {

// RMS norm of the whole row.
class NormPart : public Part {
 public:
  static constexpr const char* kKind = "norm";
  NormPart(std::vector<float> weight, float eps) : weight_(std::move(weight)), eps_(eps) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kAnywhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

  const float* weight() const { return weight_.data(); }
  float eps() const { return eps_; }

 private:
  std::vector<float> weight_;
  float eps_;
};

// Layer norm of the whole row: (x - mean) / deviation.
class LayerNormPart : public Part {
 public:
  static constexpr const char* kKind = "layer_norm";
  // bias: empty for none.
  LayerNormPart(std::vector<float> weight, std::vector<float> bias, float eps)
      : weight_(std::move(weight)), bias_(std::move(bias)), eps_(eps) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kAnywhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  std::vector<float> weight_, bias_;
  float eps_;
};

// A product with matrices over one input, with concatenated outputs, plus a bias of all outputs
// unless it is empty. The input is encoded row by row; the product takes rows together.
class LinearPart : public Part {
 public:
  static constexpr const char* kKind = "linear";
  static constexpr size_t kMaxMatrices = 8;
  // Throws std::invalid_argument if the sizes do not match.
  LinearPart(std::vector<Matrix> matrices, std::vector<float> bias);

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;
  bool ends_pass() const override { return true; }
  void together(const Step& step, const Rows& rows, const float* x, float* y) const override;
  int64_t encoding_bytes() const override;
  int64_t products() const override { return outputs_ * cols_; }

  int64_t outputs() const { return outputs_; }

 private:
  // x points to the first of `rows`.
  Activations activations(const Step& step, const Rows& rows, const float* x) const;

  std::vector<Matrix> matrices_;
  std::vector<float> bias_;
  int64_t cols_ = 0, outputs_ = 0;
  uint32_t needs_ = kFloat;
};

// RMS norm of each of some heads of the weight's length; the first begins at value `begin` of the
// row.
class HeadNormPart : public Part {
 public:
  static constexpr const char* kKind = "head_norm";
  HeadNormPart(std::vector<float> weight, float eps, int64_t begin, int64_t heads)
      : weight_(std::move(weight)), eps_(eps), begin_(begin), heads_(heads) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kInput; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  std::vector<float> weight_;  // [head_dim]
  float eps_;
  int64_t begin_, heads_;
};

// Layer norm, without bias, of each of the first `heads` heads of a row, with a weight for each.
class HeadLayerNormPart : public Part {
 public:
  static constexpr const char* kKind = "head_layer_norm";
  HeadLayerNormPart(std::vector<float> weight, float eps, int64_t heads)
      : weight_(std::move(weight)), eps_(eps), heads_(heads) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kInput; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  std::vector<float> weight_;  // [heads, head_dim]
  float eps_;
  int64_t heads_;
};

struct RopeTable {
  int64_t half = 0;         // pairs that rotate
  std::vector<float> cos;   // [positions, half]
  std::vector<float> sin;
};

// Rotary embedding of `heads` heads, the first at value `begin` of a row. The table must outlive
// the part and may grow.
class RopePart : public Part {
 public:
  static constexpr const char* kKind = "rope";
  RopePart(const RopeTable& table, int64_t heads, int64_t head_dim, int64_t begin)
      : table_(table), heads_(heads), head_dim_(head_dim), begin_(begin) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kInput; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  const RopeTable& table_;
  int64_t heads_, head_dim_, begin_;
};

// Attention of rows that hold heads of q, then k, then v unless it is latent: stores keys and
// values row by row, then attends. The stack runs the second step, which needs the rows of all
// threads.
class AttentionPart : public Part {
 public:
  static constexpr const char* kKind = "attention";
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  float soft_cap = 0;  // 0: none
  int64_t window = 0;  // number of keys that a token sees (attention/attend.h); 0: all
  bool causal = true;  // else tokens also see the later keys of their sequence
  int64_t group = 0;   // the group of its block tables; parts of one group share a plan
  int64_t latent = 0;        // number of a key's last values that are its value; 0: separate
  std::vector<float> sinks;  // [heads], or empty: scores that belong to no key
  KvLayer kv;                // the layer's memory in the pool, set before the first step

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;
  bool ends_pass() const override { return true; }

  bool planned_like(const AttentionPart& other) const;
  int64_t inputs() const { return (heads + (latent ? 1 : 2) * kv_heads) * head_dim; }
  int64_t outputs() const { return heads * (latent ? latent : head_dim); }
  // Returns the attention of a step from rows x, which hold q, k and v, into rows y.
  AttentionBatch task(const StepBatch& batch, const float* x, float* y) const;
};

// activation(first half of the row) * second half.
class GatePart : public Part {
 public:
  static constexpr const char* kKind = "gate";
  explicit GatePart(Activation activation) : activation_(activation) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  Activation activation_;
  int64_t size_ = 0;
};

// activation(row).
class ActivatePart : public Part {
 public:
  static constexpr const char* kKind = "activate";
  explicit ActivatePart(Activation activation) : activation_(activation) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kAnywhere; }
  int64_t fit(int64_t inputs) override { return size_ = inputs; }
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  Activation activation_;
  int64_t size_ = 0;
};

// xIELU of the row.
class XieluPart : public Part {
 public:
  static constexpr const char* kKind = "xielu";
  explicit XieluPart(Xielu curve) : curve_(curve) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kAnywhere; }
  int64_t fit(int64_t inputs) override { return size_ = inputs; }
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  Xielu curve_;
  int64_t size_ = 0;
};

// The row multiplied by a number.
class ScalePart : public Part {
 public:
  static constexpr const char* kKind = "scale";
  explicit ScalePart(float factor) : factor_(factor) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kInput; }
  int64_t fit(int64_t inputs) override { return size_ = inputs; }
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  float factor_;
  int64_t size_ = 0;
};

// The row's values in another order: value n of the result is value order[n].
class ReorderPart : public Part {
 public:
  static constexpr const char* kKind = "reorder";
  explicit ReorderPart(std::vector<int64_t> order) : order_(std::move(order)) {}

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  std::vector<int64_t> order_;
};

// Keeps the row for the next AddPart of its layer, which also adds it; the value becomes the
// stream. It must follow the layer's attention, which renumbers the rows.
class HoldPart : public Part {
 public:
  static constexpr const char* kKind = "hold";

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kStream; }
  int64_t fit(int64_t inputs) override { return inputs; }
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;
};

// Makes the row the residual stream: the next AddPart adds to it.
class ReplacePart : public Part {
 public:
  static constexpr const char* kKind = "replace";

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kStream; }
  int64_t fit(int64_t inputs) override { return inputs; }
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;
};

// Adds the row, and the row kept by a preceding HoldPart, to the residual stream. A norm that
// follows is computed on the sum in the same pass.
class AddPart : public Part {
 public:
  static constexpr const char* kKind = "add";
  explicit AddPart(bool held) : held_(held) {}

  bool held() const { return held_; }
  const char* kind() const override { return kKind; }
  Writes writes() const override { return norm_ ? Writes::kInput : Writes::kStream; }
  int64_t fit(int64_t inputs) override { return inputs; }
  bool fuse(const Part& next) override;
  void row(const Step& step, const Rows& rows, int64_t row, const float* x,
           float* y) const override;

 private:
  bool held_;
  const NormPart* norm_ = nullptr;
};

}  // namespace pdserve
