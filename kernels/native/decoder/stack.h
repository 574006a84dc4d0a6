// A stack of decoder layers over a paged KV cache: a whole step in one call.
//
// Data flows as in any pre-norm transformer: norm, q k v, rope, cache, attention, out, norm, gated
// feed-forward; what a layer lacks is left empty. The residual stream is float32. Owns its weights
// and its buffers, not the pool's memory. One caller at a time.
#pragma once
#include <vector>

#include "attention/attention.h"
#include "base/buffer.h"
#include "threads/pool.h"
#include "dispatch/table.h"

namespace pdserve {

// Matrices over one input, their outputs side by side.
struct Product {
  std::vector<Matrix> parts;
  std::vector<float> bias;  // of all outputs, or empty

  int64_t outputs() const;
};

constexpr size_t kMaxParts = 8;  // of a Product

using Norm = std::vector<float>;  // weights; empty: no norm at that place

struct RopeTable {
  int64_t half = 0;         // pairs that rotate
  std::vector<float> cos;   // [positions, half]
  std::vector<float> sin;
};

struct Layer {
  int64_t group = 0;   // whose block tables it uses; layers of a group have one window
  int64_t window = 0;  // keys a token sees; 0: all
  int64_t rope = 0;    // index of its table
  Norm attn_in, attn_out, ffn_in, ffn_out, q_norm, k_norm;
  Product qkv, out, gate_up, down;
  KvLayer kv;
};

struct Shape {
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;
  float eps = 1e-6f;
  float attn_scale = 1;
  float attn_soft_cap = 0;
  float logit_soft_cap = 0;
  float embed_scale = 1;
  Activation activation = Activation::kSilu;
};

// One layer group's tables for one step.
struct StepGroup {
  const int64_t* block_table = nullptr;  // [rows, width]
  int64_t width = 0;
  const int64_t* slots = nullptr;        // [tokens]
};

// A flat batch: row r has tokens [starts[r], starts[r + 1]); see engine/execution/batch.py.
struct StepBatch {
  int64_t tokens = 0;
  int64_t rows = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int64_t* starts = nullptr;   // [rows + 1]
  const int64_t* kv_lens = nullptr;  // [rows]
  std::vector<StepGroup> groups;
  const int64_t* outputs = nullptr;  // [num_outputs] tokens whose hidden states are wanted
  int64_t num_outputs = 0;           // 0: of the last layer only keys and values are computed
};

class Stack {
 public:
  Stack(Pool& pool, const Kernels& kernels, const Shape& shape)
      : pool_(pool), kernels_(kernels), shape_(shape) {}

  Shape shape() const { return shape_; }

  Matrix embedding;
  Norm norm;
  Product head;
  std::vector<RopeTable> ropes;
  std::vector<Layer> layers;

  // Writes the tokens' keys and values and hidden [num_outputs, hidden], after the last norm.
  void forward(const StepBatch& batch, float* hidden);
  // In how many shares the threads took the rows of the last step through all layers; 0: they shared
  // every operation.
  int64_t shares() const { return shares_; }
  // logits [rows, vocabulary] of such hidden states.
  void logits(const float* hidden, int64_t rows, float* logits);

 private:
  // Rows of the stream that go through a part of a layer together: all of them, each operation
  // spread over the threads, or some of many, which stay in one thread's cache from part to part.
  struct Rows {
    int64_t begin, count;
    bool alone;  // on this thread only
  };
  template <class Body>
  void over_rows(const Body& body);
  template <class Body>
  void each_row(const Rows& rows, int64_t cols, const Body& body);

  void reserve(int64_t tokens);
  void embed(const StepBatch& batch);
  // What comes after a layer's attention; that, and the next layer n up to its keys and values.
  void end_layer(const Layer& layer, const Rows& rows);
  void until_attention(size_t n, const StepBatch& batch, const Rows& rows);
  // Rows of one token each, up to the last layer's attention.
  void all_layers(const StepBatch& batch, const Rows& rows, int worker);
  std::vector<int64_t> cut(const StepBatch& batch);
  void store(const Layer& layer, const StepBatch& batch, int64_t token);
  void plan_attention(const StepBatch& batch);
  AttentionBatch attention_of(const Layer& layer, const StepBatch& batch);
  void keep_outputs(const StepBatch& batch);
  // Joins what the last part made to the stream, with its norm; `residual`: the stream is more.
  void join(const Norm& after, bool residual, const Norm& before, int64_t row, float* normed);
  // From one part to the next: joins, the norm before the next one, and its product into y.
  void enter(const Norm& after, bool residual, const Norm& before, const Product& product,
             const Rows& rows, float* y);
  Activations activations(const float* x, const Rows& rows, const Product& product);
  void multiply(const Product& product, const Activations& x, const Rows& rows, float* y);

  Pool& pool_;
  const Kernels& kernels_;
  Shape shape_;
  int64_t rows_ = 0;           // of the stream now: all tokens, or the outputs' only
  Buffer<float> delta_, residual_, normed_, qkv_, attended_, gate_up_, gated_;
  Buffer<uint8_t> encodings_;
  int64_t shares_ = 0;
  int64_t encoding_bytes_ = 0;  // of a row, whatever product it enters
  std::vector<Attention> attentions_;  // a plan for each group
};

}  // namespace pdserve
