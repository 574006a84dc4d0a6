#include "stack.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear.h"

namespace pdserve {
namespace {

constexpr int64_t kInline = 8192;  // values below which a job is not worth waking helpers for
constexpr int64_t kRowsPerPiece = 4;

const float* data_or_null(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

int64_t Product::outputs() const {
  int64_t total = 0;
  for (const Matrix& part : parts) total += part.rows;
  return total;
}

template <class Body>
void Stack::each_row(int64_t rows, int64_t cols, const Body& body) {
  if (rows * cols <= kInline) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  pool_.run(ceil_div(rows, kRowsPerPiece), [&](int64_t piece, int) {
    int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece);
    for (int64_t row = piece * kRowsPerPiece; row < end; ++row) body(row);
  });
}

Activations Stack::activations(const float* x, int64_t rows, const Product& product) {
  Activations a;
  a.rows = rows;
  a.cols = product.parts.front().cols;
  for (const Matrix& part : product.parts) a.needs |= encoding_of(part);
  a.f32 = x;
  place(a, encodings_.at_least(encoding_bytes(a)));
  return a;
}

void Stack::multiply(const Product& product, const Activations& x, float* y) {
  const Matrix* parts[kMaxParts];
  for (size_t i = 0; i < product.parts.size(); ++i) parts[i] = &product.parts[i];
  run_linear(pool_, kernels_, parts, static_cast<int>(product.parts.size()), x, y,
             product.outputs(), data_or_null(product.bias));
}

void Stack::embed(const StepBatch& batch) {
  int64_t hidden = shape_.hidden;
  float* delta = delta_.at_least(batch.tokens * hidden);
  each_row(batch.tokens, hidden, [&](int64_t token) {
    kernels_.matrix_row(embedding, batch.token_ids[token], delta + token * hidden);
    if (shape_.embed_scale != 1) kernels_.scale(delta + token * hidden, shape_.embed_scale, hidden);
  });
  rows_ = batch.tokens;
  has_residual_ = false;
}

void Stack::enter(const Norm& before, const Norm& after, const Product& product, float* y) {
  int64_t hidden = shape_.hidden;
  float* delta = delta_.get();
  float* residual = has_residual_ ? residual_.get() : residual_.at_least(rows_ * hidden);
  float* normed = after.empty() ? residual : normed_.at_least(rows_ * hidden);
  Activations x = activations(normed, rows_, product);
  each_row(rows_, hidden, [&](int64_t row) {
    float* d = delta + row * hidden;
    float* r = residual + row * hidden;
    if (!before.empty()) {
      kernels_.rms_norm(d, nullptr, before.data(), shape_.eps, hidden, nullptr, d);
    }
    kernels_.rms_norm(d, has_residual_ ? r : nullptr, data_or_null(after), shape_.eps, hidden, r,
                      after.empty() ? nullptr : normed + row * hidden);
    kernels_.encode(x, row, row + 1);
  });
  has_residual_ = true;
  multiply(product, x, y);
}

void Stack::store(const Layer& layer, const StepBatch& batch, int64_t token) {
  const RopeTable& rope = ropes[layer.rope];
  int64_t size = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
  float* q = qkv_.get() + token * (heads + 2 * kv_heads) * size;
  float* k = q + heads * size;
  for (int64_t head = 0; head < heads && !layer.q_norm.empty(); ++head) {
    float* x = q + head * size;
    kernels_.rms_norm(x, nullptr, layer.q_norm.data(), shape_.eps, size, nullptr, x);
  }
  for (int64_t head = 0; head < kv_heads && !layer.k_norm.empty(); ++head) {
    float* x = k + head * size;
    kernels_.rms_norm(x, nullptr, layer.k_norm.data(), shape_.eps, size, nullptr, x);
  }
  int64_t row = batch.positions[token] * rope.half;
  kernels_.rope(q, rope.cos.data() + row, rope.sin.data() + row, heads + kv_heads, size, rope.half);
  kernels_.store_kv(layer.kv, batch.groups[layer.group].slots[token], k, k + kv_heads * size);
}

AttentionBatch Stack::attention_of(const Layer& layer, const StepBatch& batch) {
  int64_t width = shape_.heads * shape_.head_dim;
  int64_t stride = width + 2 * shape_.kv_heads * shape_.head_dim;
  const StepGroup& group = batch.groups[layer.group];
  AttentionBatch task;
  task.q = qkv_.get();
  task.q_stride = stride;
  task.heads = shape_.heads;
  task.kv = layer.kv;
  task.block_table = group.block_table;
  task.table_stride = group.width;
  task.rows = batch.rows;
  task.starts = batch.starts;
  task.kv_lens = batch.kv_lens;
  task.scale = shape_.attn_scale;
  task.window = layer.window;
  task.soft_cap = shape_.attn_soft_cap;
  task.out = attended_.at_least(batch.tokens * width);
  task.out_stride = width;
  return task;
}

void Stack::plan_attention(const StepBatch& batch) {
  attentions_.resize(std::max(attentions_.size(), batch.groups.size()));
  std::vector<bool> planned(attentions_.size());
  for (const Layer& layer : layers) {
    if (planned[layer.group]) continue;
    attentions_[layer.group].plan(attention_of(layer, batch), kernels_, pool_.threads());
    planned[layer.group] = true;
  }
}

void Stack::keep_outputs(const StepBatch& batch) {
  int64_t width = shape_.heads * shape_.head_dim, hidden = shape_.hidden;
  float* attended = qkv_.at_least(batch.num_outputs * width);
  float* residual = normed_.at_least(batch.num_outputs * hidden);
  for (int64_t i = 0; i < batch.num_outputs; ++i) {
    int64_t token = batch.outputs[i];
    std::memcpy(attended + i * width, attended_.get() + token * width, width * sizeof(float));
    std::memcpy(residual + i * hidden, residual_.get() + token * hidden, hidden * sizeof(float));
  }
  std::swap(attended_, qkv_);
  std::swap(residual_, normed_);
  rows_ = batch.num_outputs;
}

void Stack::forward(const StepBatch& batch, float* hidden) {
  embed(batch);
  static const Norm kNone;
  const Norm* before = &kNone;  // of the part that made delta
  plan_attention(batch);
  for (const Layer& layer : layers) {
    bool last = &layer == &layers.back();
    int64_t qkv_width = layer.qkv.outputs();
    enter(*before, layer.attn_in, layer.qkv, qkv_.at_least(rows_ * qkv_width));
    each_row(rows_, qkv_width, [&](int64_t token) { store(layer, batch, token); });
    if (last && batch.num_outputs == 0) return;
    attentions_[layer.group].run(pool_, kernels_, attention_of(layer, batch));
    if (last) keep_outputs(batch);
    int64_t width = shape_.heads * shape_.head_dim;
    Activations x = activations(attended_.get(), rows_, layer.out);
    each_row(rows_, width, [&](int64_t row) { kernels_.encode(x, row, row + 1); });
    multiply(layer.out, x, delta_.at_least(rows_ * shape_.hidden));

    float* gate_up = gate_up_.at_least(rows_ * 2 * shape_.ffn);
    enter(layer.attn_out, layer.ffn_in, layer.gate_up, gate_up);
    feed_forward(layer);
    before = &layer.ffn_out;
  }
  each_row(rows_, shape_.hidden, [&](int64_t row) {
    int64_t at = row * shape_.hidden;
    float* d = delta_.get() + at;
    if (!before->empty()) {
      kernels_.rms_norm(d, nullptr, before->data(), shape_.eps, shape_.hidden, nullptr, d);
    }
    kernels_.rms_norm(d, residual_.get() + at, norm.data(), shape_.eps, shape_.hidden, nullptr,
                      hidden + at);
  });
}

void Stack::feed_forward(const Layer& layer) {
  int64_t ffn = shape_.ffn;
  float* gated = gated_.at_least(rows_ * ffn);
  Activations x = activations(gated, rows_, layer.down);
  each_row(rows_, ffn, [&](int64_t row) {
    const float* gate = gate_up_.get() + row * 2 * ffn;
    kernels_.gated(gate, gate + ffn, shape_.activation, ffn, gated + row * ffn);
    kernels_.encode(x, row, row + 1);
  });
  multiply(layer.down, x, delta_.at_least(rows_ * shape_.hidden));
}

void Stack::logits(const float* hidden, int64_t rows, float* logits) {
  Activations x = activations(hidden, rows, head);
  each_row(rows, shape_.hidden, [&](int64_t row) { kernels_.encode(x, row, row + 1); });
  multiply(head, x, logits);
  if (shape_.logit_soft_cap == 0) return;
  int64_t vocab = head.outputs();
  each_row(rows, vocab, [&](int64_t row) {
    kernels_.soft_cap(logits + row * vocab, shape_.logit_soft_cap, vocab);
  });
}

}  // namespace pdserve
