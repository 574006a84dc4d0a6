// Attention of a batch over the pool, divided into pieces for the threads.
//
// Owns the plan and the scratch memory of all workers, which persist between steps. The division
// depends on the batch and the number of threads, but never affects a result.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "threads/pool.h"
#include "dispatch/table.h"

namespace pdserve {

// Rows as in kernels/reference/layers.py: row r has tokens [starts[r], starts[r + 1]), the last at
// position kv_lens[r] - 1. The pool already holds their keys and values.
struct AttentionBatch {
  KvLayer kv;
  int64_t heads = 0;                     // of q, a multiple of kv.kv_heads
  const float* q = nullptr;              // [tokens, heads, head_dim], q_stride floats per token
  int64_t q_stride = 0;
  float* out = nullptr;                  // [tokens, heads, value_dim], with out_stride
  int64_t out_stride = 0;
  int64_t rows = 0;
  const int64_t* block_table = nullptr;  // [rows, ...], table_stride per row
  int64_t table_stride = 0;
  const int64_t* starts = nullptr;       // [rows + 1]
  const int64_t* kv_lens = nullptr;      // [rows]
  float scale = 1;
  int64_t window = 0;
  bool causal = true;
  float soft_cap = 0;
  const float* sinks = nullptr;  // [heads], or null
};

class Attention {
 public:
  // Divides the batch into pieces. Reads only its sizes, starts, kv_lens, window and causal, so that
  // one plan serves all layers that agree in these; q, out, kv.data and block_table may be null.
  void plan(const AttentionBatch& batch, const Kernels& kernels, int threads);

  // Computes a batch of the planned shape on a pool with the planned number of threads.
  void run(Pool& pool, const Kernels& kernels, const AttentionBatch& batch) {
    pool.run(pieces(), [&](int64_t index, int worker) { piece(kernels, batch, index, worker); });
  }

  // Computes the rows [begin, end), of one token each, on the calling thread, for threads that each
  // take separate rows through all layers; `worker` is below the planned number of threads.
  void run_rows(const Kernels& kernels, const AttentionBatch& batch, int64_t begin, int64_t end,
                int worker);

  // Number of pieces of the plan; threads take them one at a time.
  int64_t pieces() const { return static_cast<int64_t>(pieces_.size()); }

  // Returns the cost of a planned row; a tile of keys for one query head costs 1.
  int64_t cost(int64_t row) const { return row_costs_[static_cast<size_t>(row)]; }

 private:
  struct Piece {
    int64_t row, head, heads;             // query heads from `head` on, of one kv head
    int64_t token, tokens;                // token: the first, relative to the row
    int64_t split;                        // index into splits_, or -1: all tiles at once
    int64_t begin, end;                   // tiles, if split
    int64_t cost;
  };
  struct Split {  // queries whose tiles several pieces compute; the last piece merges them
    int64_t first_tile, parts, states_at;
  };
  static int64_t cost(const Piece& piece);
  void divide_heads(int64_t share);
  void divide_keys(const AttentionBatch& batch, int64_t share);
  void piece(const Kernels& kernels, const AttentionBatch& batch, int64_t index, int worker);
  float* scratch(int worker) { return scratch_.get() + worker * scratch_floats_; }
  static Attend shape(const AttentionBatch& batch, const Piece& piece);
  static Attend locate(const AttentionBatch& batch, const Piece& piece);

  using Floats = std::unique_ptr<float[], decltype(&std::free)>;

  int threads_ = 1;
  std::vector<Piece> pieces_;  // longest first
  std::vector<Split> splits_;
  int64_t states_floats_ = 0;  // for all splits
  std::vector<int64_t> row_costs_;
  std::unique_ptr<std::atomic<int64_t>[]> done_;  // finished pieces of each split; 0 between runs
  size_t done_size_ = 0;
  Floats scratch_{nullptr, &std::free};  // scratch_floats_ per worker
  int64_t scratch_floats_ = 0;
  int64_t scratch_size_ = 0;
  Floats states_{nullptr, &std::free};
  int64_t states_size_ = 0;
};

}  // namespace pdserve
