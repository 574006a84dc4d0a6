// The layout of keys and values for attention, and one task of attention.
#pragma once
#include "base/common.h"

namespace pdserve {

enum class KvType : int { kF32, kBf16, kF16, kI8 };

// One layer of the pool: [blocks][2][kv_heads] of block_size * head_dim numbers. A block stores
// values as [block_size, head_dim] and keys as [head_dim, block_size], so that a vector holds 16
// keys. kI8: the float32 scales [2][kv_heads][block_size] follow the numbers of a block.
//
// Latent (DeepSeek-V2, arXiv:2405.04434): [blocks][kv_heads] of keys only, [block_size, head_dim];
// the last `latent` numbers of a key are its value. The scales are [kv_heads][block_size].
struct KvLayer {
  uint8_t* data = nullptr;
  KvType type = KvType::kF32;
  int64_t block_bytes = 0;
  int64_t block_size = 0;  // a multiple of 16
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t latent = 0;  // 0: separate values, as long as the keys

  int64_t value_dim() const { return latent ? latent : head_dim; }
  int64_t vectors() const { return (latent ? 1 : 2) * kv_heads * block_size; }  // of a block
};

// Returns the bytes of one block of a layer.
inline int64_t kv_block_bytes(const KvLayer& kv) {
  switch (kv.type) {
    case KvType::kF32:
      return kv.vectors() * kv.head_dim * 4;
    case KvType::kBf16:
    case KvType::kF16:
      return kv.vectors() * kv.head_dim * 2;
    case KvType::kI8:
      break;
  }
  return kv.vectors() * (kv.head_dim + 4);
}

// Queries of one sequence at consecutive positions that read the keys of one kv head, for all or
// some of its query heads.
struct Attend {
  KvLayer kv;
  const int64_t* blocks = nullptr;  // blocks[c] holds positions from c * block_size
  int64_t kv_head = 0;
  int64_t group = 0;                // query heads, adjacent in q
  int64_t tokens = 0;
  int64_t position = 0;             // of the first token
  int64_t keys = 0;                 // of the sequence; only tasks that are not causal read it
  bool causal = true;               // a token sees no later keys
  int64_t window = 0;               // keys that a token sees up to its own, and, if not causal, from
                                    // its own on; 0: all
  float scale = 1;
  float soft_cap = 0;               // 0: none
  const float* sinks = nullptr;     // [group], or null: scores that belong to no key
  const float* q = nullptr;         // token t, head g at q + t * q_stride + g * head_dim
  int64_t q_stride = 0;
  float* out = nullptr;             // like q, with out_stride and value_dim
  int64_t out_stride = 0;
  const Attend* next = nullptr;     // the thread's likely next task, for prefetching; or null
};

// A query's result is computed in tiles of kKeyTile keys aligned to position 0. Each tile is
// computed separately (maximum, weights, weighted sum of values), then tiles are merged in order.
constexpr int64_t kKeyTile = 64;

// Returns the end of the keys that the token-th token of the task sees.
inline int64_t seen_end(const Attend& task, int64_t token) {
  const int64_t own = task.position + token;
  if (task.causal) return own + 1;
  return task.window > 0 && own + task.window < task.keys ? own + task.window : task.keys;
}

// The tiles [first_tile, end_tile) contain all keys that the task's queries see.
inline int64_t first_tile(const Attend& task) {
  bool bounded = task.window > 0 && task.position >= task.window;
  return bounded ? (task.position - task.window + 1) / kKeyTile : 0;
}
inline int64_t end_tile(const Attend& task) {
  return ceil_div(seen_end(task, task.tokens - 1), kKeyTile);
}
// Returns the number of floats for the result of one tile for all queries of the task.
inline int64_t tile_floats(const Attend& task) {
  int64_t queries = task.tokens * task.group;
  return queries * (round_up(task.kv.value_dim(), kLanes) + kLanes) + round_up(queries, kLanes);
}

}  // namespace pdserve
