#include "attention/attention.h"

#include <algorithm>

namespace pdserve {
namespace {

constexpr int64_t kChunkQueries = 192;   // per piece: enough to amortize the unpacking of the keys
constexpr int64_t kSplitQueries = 16;    // pieces with more queries are not split by keys
constexpr int64_t kPiecesPerThread = 4;  // small enough that threads finish at about the same time

template <class T>
void grow(T& memory, int64_t& size, int64_t floats) {
  if (floats <= size) return;
  size_t bytes = static_cast<size_t>(round_up(floats * 4, kAlign));
  memory.reset(static_cast<float*>(std::aligned_alloc(kAlign, bytes)));
  if (!memory) throw std::bad_alloc();
  size = floats;
}

}  // namespace

// Returns the sizes of a piece's work; its pointers stay null.
Attend Attention::shape(const AttentionBatch& batch, const Piece& piece) {
  Attend work;
  work.kv = batch.kv;
  work.kv_head = piece.head / (batch.heads / batch.kv.kv_heads);
  work.group = piece.heads;
  work.tokens = piece.tokens;
  int64_t num_tokens = batch.starts[piece.row + 1] - batch.starts[piece.row];
  work.position = batch.kv_lens[piece.row] - num_tokens + piece.token;
  work.keys = batch.kv_lens[piece.row];
  work.causal = batch.causal;
  work.window = batch.window;
  work.scale = batch.scale;
  work.soft_cap = batch.soft_cap;
  work.q_stride = batch.q_stride;
  work.out_stride = batch.out_stride;
  return work;
}

Attend Attention::locate(const AttentionBatch& batch, const Piece& piece) {
  Attend work = shape(batch, piece);
  int64_t token = batch.starts[piece.row] + piece.token;
  work.blocks = batch.block_table + piece.row * batch.table_stride;
  work.q = batch.q + token * batch.q_stride + piece.head * batch.kv.head_dim;
  work.out = batch.out + token * batch.out_stride + piece.head * batch.kv.value_dim();
  if (batch.sinks) work.sinks = batch.sinks + piece.head;
  return work;
}

// Unpacking a tile has a cost even for a single query.
int64_t Attention::cost(const Piece& piece) {
  return (piece.end - piece.begin) * (piece.tokens * piece.heads + 2);
}

void Attention::plan(const AttentionBatch& batch, const Kernels& kernels, int threads) {
  threads_ = threads;
  pieces_.clear();
  splits_.clear();
  states_floats_ = 0;
  row_costs_.assign(static_cast<size_t>(batch.rows), 0);
  int64_t group = batch.heads / batch.kv.kv_heads;
  int64_t chunk = std::max<int64_t>(1, kChunkQueries / group);
  int64_t total = 0, scratch = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    int64_t num_tokens = batch.starts[row + 1] - batch.starts[row];
    // Heads are the inner loop, so that the reads of a row's blocks are close in time.
    for (int64_t token = 0; token < num_tokens; token += chunk) {
      for (int64_t head = 0; head < batch.heads; head += group) {
        Piece piece{row, head, group, token, std::min(chunk, num_tokens - token), -1, 0, 0, 0};
        Attend work = shape(batch, piece);
        piece.begin = first_tile(work);
        piece.end = end_tile(work);
        piece.cost = cost(piece);
        total += piece.cost;
        row_costs_[static_cast<size_t>(row)] += piece.cost;
        scratch = std::max(scratch, kernels.attend_scratch(work));
        pieces_.push_back(piece);
      }
    }
  }
  if (threads > 1) {
    divide_heads(ceil_div(total, threads));
    divide_keys(batch, ceil_div(total, threads * kPiecesPerThread));
  }
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  scratch_floats_ = round_up(scratch, kLanes);
  grow(scratch_, scratch_size_, scratch_floats_ * threads);
  grow(states_, states_size_, states_floats_);
  if (splits_.size() > done_size_) {
    done_size_ = splits_.size();
    done_.reset(new std::atomic<int64_t>[done_size_]{});
  }
}

// Divides rows into pieces of some heads, each about one thread's share. Every piece unpacks the
// keys again, so there are at most as many as threads and as divide_keys needs to split them.
void Attention::divide_heads(int64_t share) {
  size_t whole = pieces_.size();
  for (size_t i = 0; i < whole; ++i) {
    Piece piece = pieces_[i];
    int64_t most = ceil_div(piece.tokens * piece.heads, kSplitQueries);
    int64_t parts = std::min({ceil_div(piece.cost, share), most, piece.heads});
    if (parts < 2) continue;
    int64_t size = ceil_div(piece.heads, parts);
    for (int64_t at = piece.head, end = at + piece.heads; at < end; at += size) {
      piece.head = at;
      piece.heads = std::min(size, end - at);
      piece.cost = cost(piece);
      if (at == pieces_[i].head) pieces_[i] = piece;
      else pieces_.push_back(piece);
    }
  }
}

// Divides pieces by keys into pieces of cost about `share`; the last to finish merges the results.
// A piece of only some heads is divided only if it clearly exceeds one thread's share.
void Attention::divide_keys(const AttentionBatch& batch, int64_t share) {
  size_t whole = pieces_.size();
  for (size_t i = 0; i < whole; ++i) {
    Piece piece = pieces_[i];
    int64_t tiles = piece.end - piece.begin;
    int64_t parts = std::min(tiles, ceil_div(piece.cost, std::max<int64_t>(share, 1)));
    if (parts < 2 || piece.tokens * piece.heads > kSplitQueries) continue;
    const bool some = piece.heads * batch.kv.kv_heads < batch.heads;
    if (some && piece.cost <= share * (kPiecesPerThread + 1)) continue;
    int64_t size = ceil_div(tiles, parts);
    int64_t begin = piece.begin, end = piece.end, floats = tile_floats(shape(batch, piece));
    piece.split = static_cast<int64_t>(splits_.size());
    splits_.push_back({begin, ceil_div(tiles, size), states_floats_});
    states_floats_ += tiles * floats;
    piece.cost = piece.cost / tiles * size;
    for (int64_t at = begin; at < end; at += size) {
      piece.begin = at;
      piece.end = std::min(at + size, end);
      if (at == begin) pieces_[i] = piece;
      else pieces_.push_back(piece);
    }
  }
}

void Attention::piece(const Kernels& kernels, const AttentionBatch& batch, int64_t index,
                      int worker) {
  const Piece& piece = pieces_[static_cast<size_t>(index)];
  Attend work = locate(batch, piece), next;
  // This thread probably takes that piece next, since other threads take the pieces in between.
  if (index + threads_ < pieces()) {
    next = locate(batch, pieces_[static_cast<size_t>(index + threads_)]);
    work.next = &next;
  }
  if (piece.split < 0) return kernels.attend(work, scratch(worker));
  const Split& split = splits_[static_cast<size_t>(piece.split)];
  float* states = states_.get() + split.states_at;
  float* own = states + (piece.begin - split.first_tile) * tile_floats(work);
  kernels.attend_tiles(work, piece.begin, piece.end, own, scratch(worker));
  std::atomic<int64_t>& done = done_[static_cast<size_t>(piece.split)];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < split.parts) return;
  done.store(0, std::memory_order_relaxed);
  kernels.attend_merge(work, states, scratch(worker));
}

void Attention::run_rows(const Kernels& kernels, const AttentionBatch& batch, int64_t begin,
                         int64_t end, int worker) {
  const int64_t heads = batch.kv.kv_heads, group = batch.heads / heads;
  const auto at = [&](int64_t n) {
    return locate(batch, Piece{n / heads, n % heads * group, group, 0, 1, -1, 0, 0, 0});
  };
  Attend work = at(begin * heads);
  for (int64_t n = begin * heads + 1; n <= end * heads; ++n) {
    Attend next = work;
    if (n < end * heads) {
      next = at(n);
      work.next = &next;
    }
    kernels.attend(work, scratch(worker));
    work = next;
  }
}

}  // namespace pdserve
