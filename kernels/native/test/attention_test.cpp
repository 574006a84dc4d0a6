// Paged attention: every target stores the same bytes and gives the same bits for any part of the
// queries or keys per call, close to a softmax in double.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "kernels.h"

namespace pdserve {
namespace {

constexpr int64_t kBlocks = 16;  // of the pool; the sequence uses some, unordered

struct Case {
  KvType type;
  int64_t kv_heads, group, head_dim, block_size, position, tokens, window;
  float soft_cap;
  bool sinks = false;
  int64_t latent = 0;  // number of last values of a key that are its value
  bool causal = true;

  int64_t value_dim() const { return latent ? latent : head_dim; }
};

// Returns the largest error of stored numbers up to 1, including float32 arithmetic.
double bound(KvType type) {
  switch (type) {
    case KvType::kF32: return 1e-5;
    case KvType::kF16: return 2e-3;
    case KvType::kBf16:
    case KvType::kI8: break;
  }
  return 2e-2;
}

struct Sequence {
  Case shape;
  int64_t length, width, out_width;  // keys; floats of a token's queries, and of its results
  std::vector<float> keys, values, q, sinks;
  std::vector<int64_t> blocks;

  Sequence(Random& random, const Case& c)
      : shape(c), length(c.position + c.tokens), width(c.kv_heads * c.group * c.head_dim),
        out_width(c.kv_heads * c.group * c.value_dim()), keys(length * c.kv_heads * c.head_dim), values(keys.size()), q(c.tokens * width),
        sinks(c.sinks ? c.kv_heads * c.group : 0) {
    for (std::vector<float>* each : {&keys, &values, &q, &sinks}) {
      fill(random, each->data(), static_cast<int64_t>(each->size()));
    }
    if (c.latent) {  // the value; the rest of its space is not read
      for (int64_t at = 0; at < static_cast<int64_t>(keys.size()); at += c.head_dim) {
        std::copy_n(keys.data() + at + c.head_dim - c.latent, c.latent, values.data() + at);
      }
    }
    for (int64_t b = 0; b < kBlocks; ++b) blocks.push_back((b * 5 + 3) % kBlocks);
  }
};

KvLayer layer(const Case& c) {
  KvLayer kv;
  kv.type = c.type;
  kv.block_size = c.block_size;
  kv.kv_heads = c.kv_heads;
  kv.head_dim = c.head_dim;
  kv.latent = c.latent;
  const int64_t size = c.type == KvType::kF32 ? 4 : c.type == KvType::kI8 ? 1 : 2;
  kv.block_bytes = (c.latent ? 1 : 2) * c.kv_heads * c.block_size *
                   (c.head_dim * size + (size == 1 ? 4 : 0));
  return kv;
}

// Returns the pool after storing the sequence.
Guarded<uint8_t> stored(const Kernels& kernels, const Sequence& s, KvLayer& kv) {
  Guarded<uint8_t> pool(kBlocks * kv.block_bytes);
  std::memset(pool.data(), 0, pool.size());
  kv.data = pool.data();
  const int64_t row = s.shape.kv_heads * s.shape.head_dim;
  for (int64_t p = 0; p < s.length; ++p) {
    const int64_t slot = s.blocks[p / kv.block_size] * kv.block_size + p % kv.block_size;
    Guarded<float> k(row), v(row);
    std::memcpy(k.data(), s.keys.data() + p * row, row * sizeof(float));
    std::memcpy(v.data(), s.values.data() + p * row, row * sizeof(float));
    kernels.store_kv(kv, slot, k.data(), s.shape.latent ? nullptr : v.data());
  }
  return pool;
}

// Returns memory that is aligned to 64 bytes and ends at an inaccessible page.
Guarded<float> scratch_for(int64_t floats) { return Guarded<float>(round_up(floats, kLanes)); }

// Computes tokens [from, from + count) of one kv head, by one call or by tiles in reverse order.
void attend(const Kernels& kernels, const Sequence& s, const KvLayer& kv, int64_t head,
            int64_t from, int64_t count, bool by_tiles, float* out) {
  const Guarded<float> q = [&] {  // only the requested tokens
    Guarded<float> copy(count * s.width);
    std::memcpy(copy.data(), s.q.data() + from * s.width, copy.size() * sizeof(float));
    return copy;
  }();
  const int64_t at = head * s.shape.group * s.shape.head_dim;
  Attend task;
  task.kv = kv;
  task.blocks = s.blocks.data();
  task.kv_head = head;
  task.group = s.shape.group;
  task.tokens = count;
  task.position = s.shape.position + from;
  task.keys = s.length;
  task.causal = s.shape.causal;
  task.window = s.shape.window;
  task.scale = 1 / std::sqrt(static_cast<float>(s.shape.head_dim));
  task.soft_cap = s.shape.soft_cap;
  if (s.shape.sinks) task.sinks = s.sinks.data() + head * s.shape.group;
  task.q = q.data() + at;
  task.q_stride = s.width;
  task.out = out + from * s.out_width + head * s.shape.group * s.shape.value_dim();
  task.out_stride = s.out_width;
  Guarded<float> scratch = scratch_for(kernels.attend_scratch(task));
  if (!by_tiles) return kernels.attend(task, scratch.data());
  const int64_t first = first_tile(task), end = end_tile(task), floats = tile_floats(task);
  Guarded<float> states = scratch_for((end - first) * floats);
  for (int64_t tile = end; tile-- > first;) {
    kernels.attend_tiles(task, tile, tile + 1, states.data() + (tile - first) * floats,
                         scratch.data());
  }
  kernels.attend_merge(task, states.data(), scratch.data());
}

void check_softmax(const Sequence& s, const float* out) {
  const Case& c = s.shape;
  const int64_t row = c.kv_heads * c.head_dim;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const int64_t own = c.position + t;
    const int64_t begin = c.window ? std::max<int64_t>(0, own + 1 - c.window) : 0;
    int64_t end = own + 1;
    if (!c.causal) end = c.window ? std::min(s.length, own + c.window) : s.length;
    for (int64_t h = 0; h < c.kv_heads * c.group; ++h) {
      const int64_t query = t * s.width + h * c.head_dim, key = h / c.group * c.head_dim;
      std::vector<double> mean(c.value_dim());
      double total = c.sinks ? std::exp(double{s.sinks[h]}) : 0;
      for (int64_t p = begin; p < end; ++p) {
        double score = 0;
        for (int64_t d = 0; d < c.head_dim; ++d) {
          score += double{s.q[query + d]} * s.keys[p * row + key + d];
        }
        score /= std::sqrt(static_cast<double>(c.head_dim));
        if (c.soft_cap) score = c.soft_cap * std::tanh(score / c.soft_cap);
        const double weight = std::exp(score);
        total += weight;
        for (int64_t d = 0; d < c.value_dim(); ++d) mean[d] += weight * s.values[p * row + key + d];
      }
      const float* result = out + t * s.out_width + h * c.value_dim();
      for (int64_t d = 0; d < c.value_dim(); ++d) {
        const double want = mean[d] / total;
        CHECK(std::fabs(result[d] - want) <= bound(c.type),
              "kv type %d, token %d, head %d: %g, not %g", static_cast<int>(c.type),
              static_cast<int>(t), static_cast<int>(h), result[d], want);
      }
    }
  }
}

void check_case(Random& random, const Case& c) {
  const Sequence s(random, c);
  KvLayer kv = layer(c);
  const Guarded<uint8_t> expected_pool = stored(generic_kernels(), s, kv);
  Guarded<float> expected(c.tokens * s.out_width);
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    attend(generic_kernels(), s, kv, h, 0, c.tokens, false, expected.data());
  }
  check_softmax(s, expected.data());
  for (const Kernels* target : targets()) {
    const Guarded<uint8_t> pool = stored(*target, s, kv);
    CHECK(!std::memcmp(pool.data(), expected_pool.data(), pool.size()), "%s: bytes of kv type %d",
          target->isa, static_cast<int>(c.type));
    for (bool by_tiles : {false, true}) {
      for (int64_t step : {c.tokens, int64_t{1}, int64_t{3}}) {  // chunks of the tokens
        Guarded<float> out(expected.size());
        for (int64_t h = 0; h < c.kv_heads; ++h) {
          for (int64_t t = 0; t < c.tokens; t += step) {
            attend(*target, s, kv, h, t, std::min(step, c.tokens - t), by_tiles, out.data());
          }
        }
        check_same(*target, by_tiles ? "attention by tiles" : "attention", out.data(),
                   expected.data(), out.size());
      }
    }
    // The plan that the engine runs, on threads.
    const std::vector<int64_t> starts = {0, c.tokens}, kv_lens = {s.length};
    Guarded<float> out(expected.size());
    AttentionBatch batch;
    batch.kv = kv;
    batch.heads = c.kv_heads * c.group;
    batch.q = s.q.data();
    batch.q_stride = s.width;
    batch.out_stride = s.out_width;
    batch.out = out.data();
    batch.rows = 1;
    batch.block_table = s.blocks.data();
    batch.table_stride = kBlocks;
    batch.starts = starts.data();
    batch.kv_lens = kv_lens.data();
    batch.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
    batch.window = c.window;
    batch.causal = c.causal;
    batch.soft_cap = c.soft_cap;
    batch.sinks = c.sinks ? s.sinks.data() : nullptr;
    const bool many_heads = c.group > 32;  // more per thread than one piece has
    for (int count = many_heads ? 1 : 3; count <= 3; ++count) {
      Pool threads(count, {}, 5);
      Attention attention;
      attention.plan(batch, *target, count);
      if (many_heads) {
        CHECK(attention.pieces() == count, "%d pieces", static_cast<int>(attention.pieces()));
      }
      for (int k = 0; k < 2; ++k) attention.run(threads, *target, batch);  // a plan serves all layers
      check_same(*target, "attention over threads", out.data(), expected.data(), out.size());
    }
  }
}

}  // namespace

void test_attention() {
  Random random(7);
  int64_t number = 0;
  for (KvType type : {KvType::kF32, KvType::kBf16, KvType::kF16, KvType::kI8}) {
    const Case cases[] = {
        {type, 1, 1, 16, 16, 0, 1, 0, 0},      // one key
        {type, 3, 3, 64, 16, 130, 1, 0, 0},    // decode
        {type, 1, 4, 64, 32, 0, 70, 0, 0},     // a prompt
        {type, 2, 2, 48, 16, 60, 9, 0, 0},     // a chunk over the border of a tile
        {type, 1, 2, 20, 16, 100, 5, 50, 0},   // a window, a head size that is not a multiple of 16
        {type, 2, 1, 7, 16, 20, 4, 3, 5},      // a small window, a soft cap, a small head
        {type, 1, 1, 128, 16, 190, 20, 0, 2},
        {type, 2, 3, 24, 16, 60, 12, 50, 0, true},
        {type, 1, 3, 36, 16, 70, 9, 0, 0, false, 28},  // latent
        {type, 2, 4, 80, 32, 130, 1, 0, 2, true, 64},
        {type, 1, 50, 36, 16, 130, 1, 0, 0, true, 28},  // one sequence: the heads are divided
        {type, 1, 50, 20, 16, 70, 1, 30, 0, true},
        {type, 1, 2, 64, 16, 0, 150, 0, 0, false, 0, false},  // not causal
        {type, 2, 2, 24, 32, 0, 90, 9, 5, true, 0, false},    // and with a window
    };
    for (const Case& c : cases) {
      if (runs(number++)) check_case(random, c);
    }
  }
}

}  // namespace pdserve
