// Steps of a whole stack: equal bits on one to three threads, for a batch and for each of its tokens
// alone, with every kind of part that computes rows together; and the division of grouped products.
#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "decoder/experts.h"
#include "decoder/head_linear.h"
#include "decoder/stack.h"
#include "linear/pack.h"
#include "kernels.h"

namespace pdserve {
namespace {

constexpr int64_t kHidden = 64, kHeads = 4, kDim = 32, kLatent = 24, kVocabulary = 40;
constexpr int64_t kBlockSize = 16, kWidth = 6;  // blocks of a sequence
constexpr int64_t kExperts = 48, kTopK = 6;

std::vector<float> numbers(Random& random, int64_t rows, int64_t cols) {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  fill(random, values.data(), rows * cols, 2 / std::sqrt(static_cast<float>(cols)));
  return values;
}

Matrix packed(const std::vector<float>& values, int64_t rows, int64_t cols) {
  Pool alone(1);
  return pack(alone, stored_format("F32"), reinterpret_cast<const uint8_t*>(values.data()),
              rows * cols * 4, rows, cols);
}

Matrix matrix(Random& random, int64_t rows, int64_t cols) {
  return packed(numbers(random, rows, cols), rows, cols);
}

// Returns a Q8_0 matrix, whose inputs are encoded.
Matrix levels(Random& random, int64_t rows, int64_t cols) {
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * cols / 32 * 34));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(random.bits());
  const uint16_t scale = half_of(false, -9, 300);
  for (size_t i = 0; i < bytes.size(); i += 34) std::memcpy(bytes.data() + i, &scale, 2);
  Pool alone(1);
  return pack(alone, stored_format("Q8_0"), bytes.data(), static_cast<int64_t>(bytes.size()), rows,
              cols);
}

std::vector<float> ones(int64_t count) { return std::vector<float>(static_cast<size_t>(count), 1); }

template <class T, class... Args>
void append(Parts& parts, Args&&... args) {
  parts.push_back(std::make_unique<T>(std::forward<Args>(args)...));
}

// Attention with separate or latent values, after a product for each head.
void append_attention(Random& random, const RopeTable& rope, Parts& parts, bool latent) {
  const int64_t rows = (kHeads + (latent ? 1 : 2)) * kDim;
  append<NormPart>(parts, ones(kHidden), 1e-5f);
  append<LinearPart>(parts, std::vector<Matrix>{levels(random, rows, kHidden)},
                     std::vector<float>{});
  std::vector<Matrix> heads;
  for (int64_t head = 0; head < kHeads; ++head) heads.push_back(matrix(random, 24, 24));
  if (latent) append<HeadLinearPart>(parts, std::move(heads), 8);
  append<RopePart>(parts, rope, kHeads + 1, kDim, 0);
  auto attention = std::make_unique<AttentionPart>();
  attention->heads = kHeads;
  attention->kv_heads = 1;
  attention->head_dim = kDim;
  attention->scale = 0.2f;
  attention->group = latent;
  attention->latent = latent ? kLatent : 0;
  const int64_t outputs = attention->outputs();
  parts.push_back(std::move(attention));
  append<LinearPart>(parts, std::vector<Matrix>{matrix(random, kHidden, outputs)}, ones(kHidden));
  append<AddPart>(parts, false);
}

void append_dense(Random& random, Parts& parts) {
  append<NormPart>(parts, ones(kHidden), 1e-5f);
  append<LinearPart>(parts, std::vector<Matrix>{levels(random, 192, kHidden)},
                     std::vector<float>{});
  append<GatePart>(parts, Activation::kSilu);
  append<LinearPart>(parts, std::vector<Matrix>{levels(random, kHidden, 96)},
                     std::vector<float>{});
  append<AddPart>(parts, false);
}

void append_experts(Random& random, Parts& parts) {
  const auto expert = [&](bool biased) {
    Expert made{levels(random, 32, kHidden), matrix(random, 32, kHidden),
                levels(random, kHidden, 32), {}, {}};
    if (biased) made.gate_up_bias = ones(64);
    return made;
  };
  std::vector<Expert> all;
  for (int64_t e = 0; e < kExperts; ++e) all.push_back(expert(e % 2));
  std::vector<Matrix> router{matrix(random, kExperts, kHidden), matrix(random, 1, kHidden)};
  append<NormPart>(parts, ones(kHidden), 1e-5f);
  append<ExpertsPart>(parts, std::move(router), std::vector<float>{}, std::vector<float>{},
                      std::move(all), std::vector<Expert>{expert(false)},
                      Routing{kTopK, false, true, 1, 4, 2, 2}, Activation::kSilu);
  append<AddPart>(parts, false);
}

// A stack with its KV memory, which ends at an inaccessible page.
struct Model {
  Pool pool;
  Stack stack;
  std::vector<Guarded<uint8_t>> memory;

  Model(const Kernels& kernels, int threads, bool mixture, int64_t sequences)
      : pool(threads, {}, 5), stack(pool, kernels, kHidden, 1, 1, 0) {
    Random random(5);
    stack.embedding = matrix(random, kVocabulary, kHidden);
    RopeTable& rope = stack.ropes.emplace_back();
    rope.half = kDim / 2;
    for (int64_t i = 0; i < kBlockSize * kWidth * rope.half; ++i) {
      rope.cos.push_back(random.uniform());
      rope.sin.push_back(random.uniform());
    }
    for (bool latent : {false, true}) {
      if (latent && !mixture) continue;
      Parts parts;
      append_attention(random, rope, parts, latent);
      if (latent) append_experts(random, parts);
      else append_dense(random, parts);
      stack.add_layer(std::move(parts));
    }
    stack.set_head(std::make_unique<NormPart>(ones(kHidden), 1e-5f),
                   LinearPart({matrix(random, kVocabulary, kHidden)}, {}));
    for (AttentionPart* attention : stack.attentions()) {
      KvLayer& kv = attention->kv;
      kv.block_size = kBlockSize;
      kv.kv_heads = attention->kv_heads;
      kv.head_dim = attention->head_dim;
      kv.latent = attention->latent;
      kv.block_bytes = kv_block_bytes(kv);
      memory.emplace_back(sequences * kWidth * kv.block_bytes);
      kv.data = memory.back().data();
    }
  }

  // Runs tokens [begins[r], ends[r]) of each sequence; returns hidden states and logits of all. An
  // added embedding has a row for each token of the vocabulary.
  std::vector<float> step(const std::vector<int64_t>& begins, const std::vector<int64_t>& ends) {
    std::vector<int64_t> ids, positions, starts{0}, slots, table, outputs;
    for (size_t r = 0; r < begins.size(); ++r) {
      const auto first = static_cast<int64_t>(r) * kWidth;
      for (int64_t at = begins[r]; at < ends[r]; ++at) {
        ids.push_back((at * 7 + static_cast<int64_t>(r) * 3) % kVocabulary);
        positions.push_back(at);
        slots.push_back(first * kBlockSize + at);
        outputs.push_back(static_cast<int64_t>(outputs.size()));
      }
      starts.push_back(static_cast<int64_t>(ids.size()));
      for (int64_t b = 0; b < kWidth; ++b) table.push_back(first + b);
    }
    StepBatch batch;
    batch.tokens = batch.num_outputs = static_cast<int64_t>(ids.size());
    batch.rows = static_cast<int64_t>(begins.size());
    batch.token_ids = ids.data();
    if (!stack.added.empty()) batch.added_ids = ids.data();
    batch.positions = positions.data();
    batch.starts = starts.data();
    batch.kv_lens = ends.data();
    batch.groups.assign(2, StepGroup{table.data(), kWidth, slots.data()});
    batch.outputs = outputs.data();
    Guarded<float> hidden(batch.tokens * kHidden), logits(batch.tokens * kVocabulary);
    stack.forward(batch, hidden.data());
    stack.logits(hidden.data(), batch.tokens, logits.data());
    std::vector<float> all(hidden.data(), hidden.data() + hidden.size());
    all.insert(all.end(), logits.data(), logits.data() + logits.size());
    return all;
  }
};

void check_bits(const Kernels& target, int threads, const std::vector<float>& got,
                const std::vector<float>& want) {
  CHECK(got.size() == want.size(), "%zu floats, not %zu", got.size(), want.size());
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) {
    CHECK(same_bits(got[i], want[i]), "%s, %d threads, float %zu: %a, not %a", target.isa, threads,
          i, got[i], want[i]);
  }
}

// Prompts, whose experts are chosen together on all threads, then some decode steps.
void check_mixture(const Kernels& target) {
  const std::vector<int64_t> none{0, 0, 0}, prompts{45, 2, 17}, longer{46, 3, 18};
  Model alone(target, 1, true, 3);
  const std::vector<float> first = alone.step(none, prompts), next = alone.step(prompts, longer);
  CHECK(std::isfinite(first[0]) && first[0] != first[kHidden], "rows tell nothing");
  for (int threads : {2, 3}) {
    Model model(target, threads, true, 3);
    check_bits(target, threads, model.step(none, prompts), first);
    check_bits(target, threads, model.step(prompts, longer), next);
  }
  Model one(target, 2, true, 1);  // the first sequence, one token per step
  for (int64_t at = 0; at < longer[0]; ++at) {
    const std::vector<float> got = one.step({at}, {at + 1});
    const float* want = at < prompts[0] ? first.data() + at * kHidden : next.data();
    for (int64_t c = 0; c < kHidden; ++c) {
      CHECK(same_bits(got[static_cast<size_t>(c)], want[c]), "%s: token %d alone, value %d",
            target.isa, static_cast<int>(at), static_cast<int>(c));
    }
  }
}

// Many decode rows, of which each thread takes a share through all layers.
void check_shares(const Kernels& target) {
  constexpr int64_t kRows = 50;
  const std::vector<int64_t> zeros(kRows, 0), ones(kRows, 1), twos(kRows, 2);
  Model alone(target, 1, false, kRows);
  const std::vector<float> first = alone.step(zeros, ones), next = alone.step(ones, twos);
  for (int threads : {2, 3}) {
    Model model(target, threads, false, kRows);
    check_bits(target, threads, model.step(zeros, ones), first);
    check_bits(target, threads, model.step(ones, twos), next);
    CHECK(model.stack.shares() == threads, "%d shares", static_cast<int>(model.stack.shares()));
  }
}

// An added embedding gives the bits of an embedding that holds the sums.
void check_added(const Kernels& target, Random& random) {
  const std::vector<float> own = numbers(random, kVocabulary, kHidden);
  const std::vector<float> more = numbers(random, kVocabulary, kHidden);
  std::vector<float> sums = own;
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
  Model plain(target, 2, false, 1), added(target, 2, false, 1);
  plain.stack.embedding = packed(sums, kVocabulary, kHidden);
  added.stack.embedding = packed(own, kVocabulary, kHidden);
  added.stack.added = more;
  check_bits(target, 2, added.step({0}, {45}), plain.step({0}, {45}));
  check_bits(target, 2, added.step({45}, {46}), plain.step({45}, {46}));
}

// The calls of `counting` by group: the tiles, and the number of rows times tiles per call.
struct Calls {
  std::mutex mutex;
  std::vector<std::vector<int>> of_tile;  // [groups][tiles]
  int64_t most = 0;
};
Calls* calls = nullptr;

void counting(const Matrix& m, const Activations& x, float*, int64_t, int64_t begin, int64_t end) {
  const std::lock_guard<std::mutex> lock(calls->mutex);
  for (int64_t tile = begin; tile < end; ++tile) {
    ++calls->of_tile[static_cast<size_t>(m.offset)][static_cast<size_t>(tile)];
  }
  calls->most = std::max(calls->most, x.rows * (end - begin));
}

// Groups of very different sizes: each tile is computed once, and no piece greatly exceeds its
// share.
void check_cuts(Random& random) {
  constexpr int64_t kTiles = 64;
  for (int threads : {1, 2, 3}) {
    Calls made;
    calls = &made;
    Kernels kernels = generic_kernels();
    kernels.linear = counting;
    std::vector<Matrix> matrices;
    std::vector<int64_t> begins{0};
    int64_t work = 0;
    for (int g = 0; g < 40; ++g) {
      Matrix m;
      m.rows = kTiles * kLanes - g % kLanes;
      m.offset = g;  // its number
      matrices.push_back(m);
      const int64_t rows = g == 17 ? 400 : random.below(4);
      begins.push_back(begins.back() + rows);
      work += rows * kTiles;
      made.of_tile.emplace_back(kTiles, rows ? 0 : 1);
    }
    Pool pool(threads, {}, 5);
    const StepBatch batch;
    GroupScratch scratch;
    const Step step{pool, kernels, batch, nullptr, nullptr, 0, nullptr, 0, scratch};
    Activations x;
    x.rows = begins.back();
    std::vector<float> y(1);
    static const std::vector<float> kNoBias;
    multiply_groups(
        step, matrices.size(), begins.data(), x, y.data(), 0,
        [&](size_t g) { return std::array<const Matrix*, 1>{&matrices[g]}; },
        [&](size_t) -> const std::vector<float>& { return kNoBias; });
    for (const std::vector<int>& tiles : made.of_tile) {
      for (int count : tiles) CHECK(count == 1, "a tile was computed %d times", count);
    }
    CHECK(threads == 1 || made.most * threads * 2 <= work, "%d threads: a piece of %d of %d",
          threads, static_cast<int>(made.most), static_cast<int>(work));
  }
}

}  // namespace

void test_decoder() {
  Random random(13);
  check_cuts(random);
  for (const Kernels* target : targets()) {
    check_mixture(*target);
    check_shares(*target);
    check_added(*target, random);
  }
}

}  // namespace pdserve
