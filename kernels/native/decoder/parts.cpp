#include "decoder/parts.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/require.h"
#include "linear/linear.h"

namespace pdserve {
namespace {

void require_size(const char* what, int64_t has, int64_t wanted) {
  require(has == wanted,
          std::string(what) + " of " + std::to_string(has) + ", not " + std::to_string(wanted));
}

}  // namespace

int64_t NormPart::fit(int64_t inputs) {
  require_size("weight", static_cast<int64_t>(weight_.size()), inputs);
  return inputs;
}

void NormPart::row(const Step& step, const Rows&, int64_t, const float* x, float* y) const {
  const auto cols = static_cast<int64_t>(weight_.size());
  step.kernels.rms_norm(x, nullptr, weight_.data(), eps_, cols, nullptr, y);
}

int64_t LayerNormPart::fit(int64_t inputs) {
  require_size("weight", static_cast<int64_t>(weight_.size()), inputs);
  if (!bias_.empty()) require_size("bias", static_cast<int64_t>(bias_.size()), inputs);
  return inputs;
}

void LayerNormPart::row(const Step& step, const Rows&, int64_t, const float* x, float* y) const {
  const float* bias = bias_.empty() ? nullptr : bias_.data();
  step.kernels.layer_norm(x, weight_.data(), bias, eps_, static_cast<int64_t>(weight_.size()), y);
}

LinearPart::LinearPart(std::vector<Matrix> matrices, std::vector<float> bias)
    : matrices_(std::move(matrices)), bias_(std::move(bias)) {
  require(!matrices_.empty() && matrices_.size() <= kMaxMatrices, "it takes 1 to 8 matrices");
  cols_ = matrices_.front().cols;
  for (const Matrix& matrix : matrices_) {
    require_size("inputs of a matrix", matrix.cols, cols_);
    outputs_ += matrix.rows;
    needs_ |= encoding_of(matrix);
  }
  if (!bias_.empty()) require_size("bias", static_cast<int64_t>(bias_.size()), outputs_);
}

int64_t LinearPart::fit(int64_t inputs) {
  require_size("inputs", cols_, inputs);
  return outputs_;
}

int64_t LinearPart::encoding_bytes() const {
  Activations row;
  row.rows = 1;
  row.cols = cols_;
  row.needs = needs_;
  return round_up(pdserve::encoding_bytes(row), kAlign);
}

Activations LinearPart::activations(const Step& step, const Rows& rows, const float* x) const {
  Activations a;
  a.rows = rows.count;
  a.cols = cols_;
  a.needs = needs_;
  a.f32 = x;
  place(a, step.encodings + rows.begin * step.encoding_bytes);
  return a;
}

void LinearPart::row(const Step& step, const Rows& rows, int64_t row, const float* x,
                     float*) const {
  const int64_t n = row - rows.begin;
  step.kernels.encode(activations(step, rows, x - n * cols_), n, n + 1);
}

void LinearPart::together(const Step& step, const Rows& rows, const float* x, float* y) const {
  const Matrix* matrices[kMaxMatrices];
  const int count = static_cast<int>(matrices_.size());
  for (int i = 0; i < count; ++i) matrices[i] = &matrices_[static_cast<size_t>(i)];
  const float* bias = bias_.empty() ? nullptr : bias_.data();
  const Activations a = activations(step, rows, x);
  if (rows.alone) {
    const int64_t tiles = total_tiles(matrices, count);
    linear_here(step.kernels, matrices, count, a, 0, tiles, y, outputs_, bias);
  } else {
    run_linear(step.pool, step.kernels, matrices, count, a, y, outputs_, bias);
  }
}

int64_t HeadNormPart::fit(int64_t inputs) {
  const auto end = begin_ + heads_ * static_cast<int64_t>(weight_.size());
  require(end <= inputs, "it reads up to value " + std::to_string(end) + ", but a row has " +
                             std::to_string(inputs));
  return inputs;
}

void HeadNormPart::row(const Step& step, const Rows&, int64_t, const float*, float* y) const {
  const auto size = static_cast<int64_t>(weight_.size());
  for (int64_t head = 0; head < heads_; ++head) {
    float* at = y + begin_ + head * size;
    step.kernels.rms_norm(at, nullptr, weight_.data(), eps_, size, nullptr, at);
  }
}

int64_t HeadLayerNormPart::fit(int64_t inputs) {
  const auto size = static_cast<int64_t>(weight_.size());
  require(size % heads_ == 0, "weight must have equally many values for each head");
  require(size <= inputs, "it reads up to value " + std::to_string(size) + ", but a row has " +
                              std::to_string(inputs));
  return inputs;
}

void HeadLayerNormPart::row(const Step& step, const Rows&, int64_t, const float*, float* y) const {
  const int64_t size = static_cast<int64_t>(weight_.size()) / heads_;
  for (int64_t head = 0; head < heads_; ++head) {
    float* at = y + head * size;
    step.kernels.layer_norm(at, weight_.data() + head * size, nullptr, eps_, size, at);
  }
}

int64_t RopePart::fit(int64_t inputs) {
  const int64_t end = begin_ + heads_ * head_dim_;
  require(end <= inputs, "it reads up to value " + std::to_string(end) + ", but a row has " +
                             std::to_string(inputs));
  require(2 * table_.half <= head_dim_, "its table rotates more dims than a head has");
  return inputs;
}

void RopePart::row(const Step& step, const Rows&, int64_t row, const float*, float* y) const {
  const int64_t at = step.batch.positions[row] * table_.half;
  step.kernels.rope(y + begin_, table_.cos.data() + at, table_.sin.data() + at, heads_, head_dim_,
                    table_.half);
}

int64_t AttentionPart::fit(int64_t inputs) {
  require(heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  require_size("heads of q, k and v", this->inputs(), inputs);
  if (!sinks.empty()) require_size("sinks", static_cast<int64_t>(sinks.size()), heads);
  return outputs();
}

bool AttentionPart::planned_like(const AttentionPart& other) const {
  return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
         window == other.window && causal == other.causal && latent == other.latent;
}

void AttentionPart::row(const Step& step, const Rows&, int64_t row, const float* x,
                        float*) const {
  const float* k = x + heads * head_dim;
  const int64_t slot = step.batch.groups[static_cast<size_t>(group)].slots[row];
  step.kernels.store_kv(kv, slot, k, k + kv_heads * head_dim);
}

AttentionBatch AttentionPart::task(const StepBatch& batch, const float* x, float* y) const {
  const StepGroup& tables = batch.groups[static_cast<size_t>(group)];
  AttentionBatch task;
  task.q = x;
  task.q_stride = inputs();
  task.heads = heads;
  task.kv = kv;
  task.block_table = tables.block_table;
  task.table_stride = tables.width;
  task.rows = batch.rows;
  task.starts = batch.starts;
  task.kv_lens = batch.kv_lens;
  task.scale = scale;
  task.window = window;
  task.causal = causal;
  task.soft_cap = soft_cap;
  task.sinks = sinks.empty() ? nullptr : sinks.data();
  task.out = y;
  task.out_stride = outputs();
  return task;
}

int64_t GatePart::fit(int64_t inputs) {
  require(inputs % 2 == 0, "a row of " + std::to_string(inputs) + " values has no halves");
  size_ = inputs / 2;
  return size_;
}

void GatePart::row(const Step& step, const Rows&, int64_t, const float* x, float* y) const {
  step.kernels.gated(x, x + size_, activation_, size_, y);
}

void ActivatePart::row(const Step& step, const Rows&, int64_t, const float* x, float* y) const {
  step.kernels.activated(x, activation_, size_, y);
}

void XieluPart::row(const Step& step, const Rows&, int64_t, const float* x, float* y) const {
  step.kernels.xielu(x, curve_, size_, y);
}

void ScalePart::row(const Step& step, const Rows&, int64_t, const float*, float* y) const {
  step.kernels.scale(y, factor_, size_);
}

int64_t ReorderPart::fit(int64_t inputs) {
  require_size("order", static_cast<int64_t>(order_.size()), inputs);
  std::vector<bool> there(order_.size());
  for (int64_t from : order_) {
    require(from >= 0 && from < inputs && !there[static_cast<size_t>(from)],
            "order must have each value of a row once");
    there[static_cast<size_t>(from)] = true;
  }
  return inputs;
}

void ReorderPart::row(const Step&, const Rows&, int64_t, const float* x, float* y) const {
  for (size_t n = 0; n < order_.size(); ++n) y[n] = x[order_[n]];
}

void HoldPart::row(const Step& step, const Rows&, int64_t row, const float* x, float*) const {
  const size_t bytes = static_cast<size_t>(step.hidden) * sizeof(float);
  std::memcpy(step.held + row * step.hidden, x, bytes);
}

void ReplacePart::row(const Step& step, const Rows&, int64_t row, const float* x, float*) const {
  std::memcpy(step.stream + row * step.hidden, x, static_cast<size_t>(step.hidden) * sizeof(float));
}

bool AddPart::fuse(const Part& next) {
  norm_ = dynamic_cast<const NormPart*>(&next);
  return norm_ != nullptr;
}

void AddPart::row(const Step& step, const Rows&, int64_t row, const float* x, float* y) const {
  float* sum = step.stream + row * step.hidden;
  const float* weight = norm_ ? norm_->weight() : nullptr;
  const float eps = norm_ ? norm_->eps() : 0;
  if (held_) {
    const float* held = step.held + row * step.hidden;
    step.kernels.rms_norm(held, sum, nullptr, 0, step.hidden, sum, nullptr);
  }
  step.kernels.rms_norm(x, sum, weight, eps, step.hidden, sum, norm_ ? y : nullptr);
}

}  // namespace pdserve
