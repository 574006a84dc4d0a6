// Sampling: equal bits on every target, and the same results as plain loops over the whole row.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.h"

namespace pdserve {
namespace {

// Rows that end at an inaccessible page: spread, coarse, flat, with -inf, rising.
Guarded<float> random_row(Random& random, int64_t count, int kind) {
  Guarded<float> row(count);
  fill(random, row.data(), count, kind == 2 ? 0.0f : 12.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (kind == 1) row[i] = std::floor(row[i]);
    if (kind == 3 && i % 3 && i != count / 2) row[i] = -INFINITY;
  }
  if (kind == 4) std::sort(row.data(), row.data() + count);
  return row;
}

int64_t plain_argmax(const float* x, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) {
    if (x[i] > x[best]) best = i;
  }
  return best;
}

void test_row(const Kernels& k, const Guarded<float>& row, int64_t top, float temperature,
              const NoiseKey& key) {
  const Kernels& g = generic_kernels();
  int64_t count = row.size();
  const float* x = row.data();
  auto at = static_cast<long long>(count);
  CHECK(k.argmax(x, count) == plain_argmax(x, count), "%s %lld", k.isa, at);
  CHECK(k.log_sum_exp(x, count) == g.log_sum_exp(x, count), "%s %lld", k.isa, at);

  Guarded<float> scratch(k.filter_scratch(count));
  std::vector<float> sorted(x, x + count);
  std::sort(sorted.begin(), sorted.end(), [](float a, float b) { return a > b; });
  float kth = k.kth_score(x, top, count, scratch.data());
  CHECK(kth == sorted[top - 1], "%s %lld: %g", k.isa, at, kth);

  std::vector<int64_t> ids(count);
  for (int64_t i = 0; i < count; ++i) ids[i] = i;
  std::vector<float> noise(count), same(count), sums(count);
  k.gumbel_at(key, ids.data(), count, noise.data());
  g.gumbel_at(key, ids.data(), count, same.data());
  CHECK(!std::memcmp(noise.data(), same.data(), count * 4), "%s %lld", k.isa, at);

  Guarded<uint32_t> mask((count + 31) / 32);
  for (int64_t i = 0; i < mask.size(); ++i) {
    mask[i] = i % 3 ? static_cast<uint32_t>(key.seed + i) * 0x9e3779b9u : UINT32_MAX;
  }
  Guarded<float> masked(count);
  k.apply_bitmask(x, mask.data(), count, masked.data());
  for (int64_t i = 0; i < count; ++i) {
    float wanted = mask[i / 32] >> i % 32 & 1 ? x[i] : -INFINITY;
    CHECK(same_bits(masked[i], wanted), "%s %lld: %g", k.isa, at, masked[i]);
  }

  const Filter filters[] = {{}, {top, 1.0, -INFINITY}, {0, 0.9, -INFINITY}, {0, 1e-9, -3.0f},
                            {top, 0.5, -9.0f}};
  for (const Filter& filter : filters) {
    float floor = k.filter_floor(x, temperature, filter, count, scratch.data());
    float other = g.filter_floor(x, temperature, filter, count, scratch.data());
    CHECK(same_bits(floor, other), "%s %lld: %g %g", k.isa, at, floor, other);
    for (int64_t i = 0; i < count; ++i) {
      float scaled = x[i] / temperature;
      sums[i] = scaled < floor ? -INFINITY : scaled + noise[i];
    }
    int64_t winner = k.gumbel_argmax(x, temperature, floor, key, count);
    CHECK(winner == plain_argmax(sums.data(), count), "%s %lld: %lld", k.isa, at,
          static_cast<long long>(winner));
  }
}

void test_bad_scores(const Kernels& k) {
  for (int64_t count : {1, 17, 1025}) {
    for (int64_t where : {int64_t{0}, count / 2, count - 1}) {
      Random random(3);
      Guarded<float> row = random_row(random, count, 0);
      row[where] = NAN;
      CHECK(k.argmax(row.data(), count) == where, "%s", k.isa);
      row[where] = INFINITY;
      CHECK(k.argmax(row.data(), count) == where, "%s", k.isa);
      // Invalid calls must still end, and stay within the row's memory.
      Guarded<float> scratch(k.filter_scratch(count));
      for (float bad : {NAN, INFINITY, -INFINITY}) {
        row[where] = bad;
        k.filter_floor(row.data(), 1.0f, {3, 0.5, -1.0f}, count, scratch.data());
        k.filter_floor(row.data(), 1e-5f, {0, 0.5, -1.0f}, count, scratch.data());
        k.kth_score(row.data(), count, count, scratch.data());
        int64_t winner = k.gumbel_argmax(row.data(), 1.0f, -INFINITY, {}, count);
        CHECK(winner >= 0 && winner < count, "%s", k.isa);
      }
    }
  }
}

}  // namespace

void test_sampling() {
  for (const Kernels* k : targets()) {
    Random random(11);
    for (int64_t count : {1, 2, 15, 16, 17, 63, 64, 65, 1000, 1024, 1025, 5003, 20000}) {
      for (int kind = 0; kind < 5; ++kind) {
        Guarded<float> row = random_row(random, count, kind);
        NoiseKey key{static_cast<int64_t>(random.bits()) << 32, kind, count};
        test_row(*k, row, 1 + random.below(count), kind % 2 ? 1.0f : 0.7f, key);
      }
    }
    test_bad_scores(*k);
  }
}

}  // namespace pdserve
