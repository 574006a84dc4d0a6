#include "decoder/stack.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "linear/linear.h"

namespace pdserve {
namespace {

constexpr int64_t kInline = 8192;  // values below which a job is not worth waking helpers for
constexpr int64_t kRowsPerPiece = 4;
// Rows that one thread takes through a part of a layer: fewer read the weights too often, more leave
// its second cache.
constexpr int64_t kFewestAlone = 32, kMostAlone = 128;
// Rows of decode that a thread takes through all layers: fewer read the weights too often.
constexpr int64_t kFewestShare = 16;
constexpr double kUneven = 1.1;  // how much dearer than the mean a share may be

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
void Stack::over_rows(const Body& body) {
  const int64_t threads = pool_.threads();
  if (rows_ < kFewestAlone * threads) return body(Rows{0, rows_, false});
  const int64_t pieces = threads * ceil_div(rows_, threads * kMostAlone);
  const int64_t size = ceil_div(rows_, pieces);
  pool_.run(ceil_div(rows_, size), [&](int64_t piece, int) {
    body(Rows{piece * size, std::min(size, rows_ - piece * size), true});
  });
}

template <class Body>
void Stack::each_row(const Rows& rows, int64_t cols, const Body& body) {
  const int64_t end = rows.begin + rows.count;
  if (rows.alone || rows.count * cols <= kInline) {
    for (int64_t row = rows.begin; row < end; ++row) body(row);
    return;
  }
  pool_.run(ceil_div(rows.count, kRowsPerPiece), [&](int64_t piece, int) {
    const int64_t first = rows.begin + piece * kRowsPerPiece;
    for (int64_t row = first; row < std::min(end, first + kRowsPerPiece); ++row) body(row);
  });
}

// Before threads write to them: no buffer moves from here on.
void Stack::reserve(int64_t tokens) {
  for (const Layer& layer : layers) {
    for (const Product* product : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
      Activations row = activations(nullptr, Rows{0, 1, true}, *product);
      encoding_bytes_ = std::max(encoding_bytes_, round_up(encoding_bytes(row), kAlign));
    }
    qkv_.at_least(tokens * layer.qkv.outputs());
  }
  residual_.at_least(tokens * shape_.hidden);
  normed_.at_least(tokens * shape_.hidden);
  delta_.at_least(tokens * shape_.hidden);
  attended_.at_least(tokens * shape_.heads * shape_.head_dim);
  gate_up_.at_least(tokens * 2 * shape_.ffn);
  gated_.at_least(tokens * shape_.ffn);
  encodings_.at_least(tokens * encoding_bytes_);
}

// x: the first of `rows`.
Activations Stack::activations(const float* x, const Rows& rows, const Product& product) {
  Activations a;
  a.rows = rows.count;
  a.cols = product.parts.front().cols;
  for (const Matrix& part : product.parts) a.needs |= encoding_of(part);
  a.f32 = x;
  place(a, encodings_.get() + rows.begin * encoding_bytes_);
  return a;
}

void Stack::multiply(const Product& product, const Activations& x, const Rows& rows, float* y) {
  const Matrix* parts[kMaxParts];
  const int count = static_cast<int>(product.parts.size());
  for (int i = 0; i < count; ++i) parts[i] = &product.parts[i];
  const float* bias = data_or_null(product.bias);
  const int64_t outputs = product.outputs();
  if (rows.alone) {
    linear_here(kernels_, parts, count, x, 0, total_tiles(parts, count), y, outputs, bias);
  } else {
    run_linear(pool_, kernels_, parts, count, x, y, outputs, bias);
  }
}

void Stack::embed(const StepBatch& batch) {
  const int64_t hidden = shape_.hidden;
  rows_ = batch.tokens;
  each_row(Rows{0, rows_, false}, hidden, [&](int64_t token) {
    float* to = delta_.get() + token * hidden;
    kernels_.matrix_row(embedding, batch.token_ids[token], to);
    if (shape_.embed_scale != 1) kernels_.scale(to, shape_.embed_scale, hidden);
  });
}

void Stack::join(const Norm& after, bool residual, const Norm& before, int64_t row,
                 float* normed) {
  const int64_t hidden = shape_.hidden;
  float* d = delta_.get() + row * hidden;
  float* r = residual_.get() + row * hidden;
  if (!after.empty()) {
    kernels_.rms_norm(d, nullptr, after.data(), shape_.eps, hidden, nullptr, d);
  }
  kernels_.rms_norm(d, residual ? r : nullptr, data_or_null(before), shape_.eps, hidden, r, normed);
}

void Stack::enter(const Norm& after, bool residual, const Norm& before, const Product& product,
                  const Rows& rows, float* y) {
  const int64_t hidden = shape_.hidden;
  float* normed = before.empty() ? residual_.get() : normed_.get();
  const Activations x = activations(normed + rows.begin * hidden, rows, product);
  each_row(rows, hidden, [&](int64_t row) {
    join(after, residual, before, row, before.empty() ? nullptr : normed + row * hidden);
    kernels_.encode(x, row - rows.begin, row - rows.begin + 1);
  });
  multiply(product, x, rows, y + rows.begin * product.outputs());
}

void Stack::until_attention(size_t n, const StepBatch& batch, const Rows& rows) {
  static const Norm kNone;
  if (n) end_layer(layers[n - 1], rows);
  const Layer& layer = layers[n];
  const Norm& after = n ? layers[n - 1].ffn_out : kNone;
  enter(after, n > 0, layer.attn_in, layer.qkv, rows, qkv_.get());
  each_row(rows, layer.qkv.outputs(), [&](int64_t token) { store(layer, batch, token); });
}

void Stack::end_layer(const Layer& layer, const Rows& rows) {
  const int64_t width = shape_.heads * shape_.head_dim, ffn = shape_.ffn;
  Activations x = activations(attended_.get() + rows.begin * width, rows, layer.out);
  each_row(rows, width, [&](int64_t row) {
    kernels_.encode(x, row - rows.begin, row - rows.begin + 1);
  });
  multiply(layer.out, x, rows, delta_.get() + rows.begin * shape_.hidden);
  enter(layer.attn_out, true, layer.ffn_in, layer.gate_up, rows, gate_up_.get());
  x = activations(gated_.get() + rows.begin * ffn, rows, layer.down);
  each_row(rows, ffn, [&](int64_t row) {
    const float* gate = gate_up_.get() + row * 2 * ffn;
    kernels_.gated(gate, gate + ffn, shape_.activation, ffn, gated_.get() + row * ffn);
    kernels_.encode(x, row - rows.begin, row - rows.begin + 1);
  });
  multiply(layer.down, x, rows, delta_.get() + rows.begin * shape_.hidden);
}

void Stack::all_layers(const StepBatch& batch, const Rows& rows, int worker) {
  for (size_t n = 0; n < layers.size(); ++n) {
    until_attention(n, batch, rows);
    attentions_[layers[n].group].run_rows(kernels_, attention_of(layers[n], batch), rows.begin,
                                          rows.begin + rows.count, worker);
  }
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
  task.out = attended_.get();
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

// Where the rows of decode are cut, so that each thread can take a share through all layers without
// waiting for others or reading what they wrote: the first row of each, and the end. Empty if there
// are too few, or if the contexts are too unlike.
std::vector<int64_t> Stack::cut(const StepBatch& batch) {
  const int64_t threads = pool_.threads();
  if (threads < 2 || batch.rows < kFewestShare * threads) return {};
  if (batch.tokens != batch.rows || batch.num_outputs == 0) return {};
  int64_t products = 0;
  std::vector<int64_t> tiles(batch.rows);
  for (const Layer& layer : layers) {
    for (const Product* product : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
      products += product->outputs() * product->parts.front().cols;
    }
    for (int64_t row = 0; row < batch.rows; ++row) tiles[row] += attentions_[layer.group].cost(row);
  }
  // A tile of keys for one head takes about three times as long as that many products.
  const int64_t tile = 3 * 2 * kKeyTile * shape_.head_dim;
  std::vector<int64_t> until{0};  // the cost of all rows before
  for (int64_t count : tiles) until.push_back(until.back() + products + tile * count);
  std::vector<int64_t> cuts{0};
  const double mean = static_cast<double>(until.back()) / static_cast<double>(threads);
  for (int64_t n = 1; n <= threads; ++n) {
    auto next = std::upper_bound(until.begin(), until.end(), static_cast<int64_t>(mean * n));
    cuts.push_back(n < threads ? next - until.begin() - 1 : batch.rows);
    if (until[cuts[n]] - until[cuts[n - 1]] > mean * kUneven) return {};
  }
  return cuts;
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
  reserve(batch.tokens);
  embed(batch);
  plan_attention(batch);
  const std::vector<int64_t> cuts = cut(batch);
  shares_ = cuts.empty() ? 0 : static_cast<int64_t>(cuts.size()) - 1;
  if (shares_) {
    pool_.run(shares_, [&](int64_t n, int worker) {
      all_layers(batch, Rows{cuts[n], cuts[n + 1] - cuts[n], true}, worker);
    });
  } else {
    for (size_t n = 0; n < layers.size(); ++n) {
      over_rows([&](const Rows& rows) { until_attention(n, batch, rows); });
      if (n + 1 == layers.size() && batch.num_outputs == 0) return;
      const Layer& layer = layers[n];
      attentions_[layer.group].run(pool_, kernels_, attention_of(layer, batch));
    }
  }
  keep_outputs(batch);
  over_rows([&](const Rows& rows) {
    end_layer(layers.back(), rows);
    each_row(rows, shape_.hidden, [&](int64_t row) {
      join(layers.back().ffn_out, true, norm, row, hidden + row * shape_.hidden);
    });
  });
}

void Stack::logits(const float* hidden, int64_t rows, float* logits) {
  const Rows all{0, rows, false};
  Activations x = activations(hidden, all, head);
  place(x, encodings_.at_least(encoding_bytes(x)));
  each_row(all, shape_.hidden, [&](int64_t row) { kernels_.encode(x, row, row + 1); });
  multiply(head, x, all, logits);
  if (shape_.logit_soft_cap == 0) return;
  int64_t vocab = head.outputs();
  each_row(all, vocab, [&](int64_t row) {
    kernels_.soft_cap(logits + row * vocab, shape_.logit_soft_cap, vocab);
  });
}

}  // namespace pdserve
