// Compares every word of simd/ on every supported target with its scalar meaning.
#include <cfloat>
#include <cmath>

#include "dispatch/targets.h"
#include "check.h"
#include "words.h"

namespace pdserve {
namespace {

using Run = int (*)(const Operands&, Result*);

Run words_of([[maybe_unused]] const char* isa) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512")) return avx512::run_words;
  if (!std::strcmp(isa, "avx2")) return avx2::run_words;
#endif
  return generic::run_words;
}

// Edge cases of rounding, signs and ranges.
const float kFloats[] = {
    0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -0.5f, 1.5f, 2.5f, -2.5f, 0.49999997f, 8388607.5f, 8388608.0f,
    8388609.0f, -8388607.5f, 2147483520.0f, 2147483648.0f, -2147483648.0f, -2147483904.0f, 4e9f,
    FLT_MAX, -FLT_MAX, FLT_MIN, FLT_TRUE_MIN, -FLT_TRUE_MIN, INFINITY, -INFINITY, NAN, -NAN,
    65504.0f, 65519.996f, 65520.0f, -65520.0f, 65536.0f, 0x1p-14f, 0x1.ffcp-15f, 0x1.ffep-15f,
    0x1.fffffep-15f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1.8p-24f, 0x1.002p0f, 0x1.006p0f,
    0x1.0020002p0f, 127.5f, -128.5f, 3e38f};
const int32_t kInts[] = {0, 1, -1, 127, 128, -128, -129, 255, 32767, 65535, -65536,
                         16777217, INT32_MAX, INT32_MIN, INT32_MAX - 1, INT32_MIN + 1};
constexpr int64_t kNumFloats = sizeof kFloats / sizeof *kFloats;
constexpr int64_t kNumInts = sizeof kInts / sizeof *kInts;

float any_float(Random& random) {
  float x;
  uint32_t bits = random.bits();
  switch (random.below(4)) {
    case 0: return kFloats[random.below(kNumFloats)];
    case 1: std::memcpy(&x, &bits, 4); return x;
    case 2: return random.uniform();
    default: return random.uniform() * std::ldexp(1.0f, static_cast<int>(random.below(60)) - 40);
  }
}

int32_t any_int(Random& random) {
  auto x = static_cast<int32_t>(random.bits());
  switch (random.below(3)) {
    case 0: return kInts[random.below(kNumInts)];
    case 1: return x;
    default: return x >> 22;
  }
}

uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr float kTolerance = 4e-6f;  // of dot_bf16: sums of three numbers of at most 1

bool equal(Equal how, uint32_t got, uint32_t want) {
  if (got == want) return true;
  float g = as_float(got), w = as_float(want);
  if (how != Equal::kBits && std::isnan(g) && std::isnan(w)) return true;
  return how == Equal::kNearly && std::fabs(g - w) <= kTolerance;
}

void compare(const char* isa, const Operands& o) {
  Result got[kMaxResults], want[kMaxResults];
  int count = words_of(isa)(o, got), expected = scalar::run_words(o, want);
  CHECK(count == expected, "%s has %d words, not %d", isa, count, expected);
  for (int k = 0; k < count && k < expected; ++k) {
    CHECK(!std::strcmp(got[k].word, want[k].word), "%s is not %s", got[k].word, want[k].word);
    for (int l = 0; l < 16; ++l) {
      CHECK(equal(got[k].equal, got[k].lane[l], want[k].lane[l]),
            "%s %s lane %d: %08x, not %08x (a %a b %a c %a n %d)", isa, got[k].word, l,
            got[k].lane[l], want[k].lane[l], o.a[l], o.b[l], o.c[l], static_cast<int>(o.n));
    }
  }
}

// Fills the operands that depend on n, in memory that ends with the tail.
void compare_with_tails(const char* isa, Operands& o) {
  Guarded<float> a(o.n), out(o.n);
  Guarded<uint16_t> h(o.n);
  Guarded<int8_t> q(o.n);
  std::memcpy(a.data(), o.a, o.n * sizeof(float));
  std::memcpy(h.data(), o.h, o.n * sizeof(uint16_t));
  std::memcpy(q.data(), o.q, o.n);
  o.a_tail = a.data();
  o.h_tail = h.data();
  o.q_tail = q.data();
  o.out_tail = out.data();
  compare(isa, o);
}

}  // namespace

void test_words() {
  for (const Kernels* target : targets()) {
    Random random(1);
    for (int round = 0; round < 4096; ++round) {
      Operands o;
      for (int l = 0; l < 16; ++l) {
        o.a[l] = any_float(random);
        o.b[l] = any_float(random);
        // Moderate values: reduce_add and dot_bf16 start from them.
        o.c[l] = random.uniform();
        o.i[l] = any_int(random);
        o.j[l] = random.below(4) ? any_int(random) : o.i[l];
        o.h[l] = static_cast<uint16_t>(16 * round + l);  // all of them
        o.q[l] = static_cast<int8_t>(random.bits());
      }
      bool extreme = random.below(4) == 0;
      int8_t low = random.below(2) ? -128 : 127;
      for (int8_t& x : o.x) x = extreme ? low : static_cast<int8_t>(random.bits());
      for (uint16_t& x : o.pair) x = bf16(random.uniform());
      // dot_bf16 reads the bytes as numbers; the other words accept any bytes.
      for (int k = 0; k < 64; k += 2) {
        uint16_t h = extreme ? 0x3F80 : bf16(random.uniform());
        std::memcpy(o.w + k, &h, 2);
      }
      o.n = round % 17;
      o.shift = static_cast<int>(random.below(32));
      compare_with_tails(target->isa, o);
      if (!extreme) continue;
      std::memset(o.w, 255, sizeof o.w);  // the largest sums of dot; NaN for dot_bf16
      compare_with_tails(target->isa, o);
    }
  }
}

}  // namespace pdserve
