// What this machine's cores can do at most: one JSON object on standard output.
//
// usage: limits THREADS. Each figure is the best of several runs of tight loops over registers
// (operations; a multiply and an add count as two) or of one pass over a buffer far larger than the
// caches (bytes). Built with -march=native: it measures the machine, it does not ship.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTries = 7;
// Independent accumulators, more than latency times throughput; by name, since the compiler keeps
// an array of them on the stack.
#define EACH(DO) DO(a) DO(b) DO(c) DO(d) DO(e) DO(f) DO(g) DO(h) DO(i) DO(j) DO(k) DO(l)
constexpr int kChains = 12;
thread_local volatile float sink;

template <class Work>
double best_seconds(int threads, Work work) {
  double best = 1e9;
  for (int i = 0; i < kTries; ++i) {
    const auto start = Clock::now();
    std::vector<std::thread> team;
    for (int t = 1; t < threads; ++t) team.emplace_back(work, t);
    work(0);
    for (auto& member : team) member.join();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

double read_gb_s(int threads) {
  const size_t each = (size_t{512} << 20) / threads;
  std::vector<std::vector<uint8_t>> buffers(threads, std::vector<uint8_t>(each, 1));
  const double s = best_seconds(threads, [&](int t) {
    const auto* at = reinterpret_cast<const __m256i*>(buffers[t].data());
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i + 4 <= each / 32; i += 4) {
      a = _mm256_xor_si256(a, _mm256_loadu_si256(at + i));
      b = _mm256_xor_si256(b, _mm256_loadu_si256(at + i + 1));
      c = _mm256_xor_si256(c, _mm256_loadu_si256(at + i + 2));
      d = _mm256_xor_si256(d, _mm256_loadu_si256(at + i + 3));
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    sink = static_cast<float>(_mm256_extract_epi32(a, 0));
  });
  return each * threads / s / 1e9;
}

// One step of a chain of multiply-adds, and what it counts for.
#if defined(__AVX512VNNI__)
struct Int8 {
  using V = __m512i;
  static constexpr double kOps = 128;
  static V zero() { return _mm512_setzero_si512(); }
  static V step(V acc) { return _mm512_dpbusd_epi32(acc, _mm512_set1_epi8(1), _mm512_set1_epi8(2)); }
  static float value(V v) { return static_cast<float>(_mm512_reduce_add_epi32(v)); }
};
#else
struct Int8 {
  using V = __m256i;
  static constexpr double kOps = 64;
  static V zero() { return _mm256_setzero_si256(); }
  static V step(V acc) {
    const V pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_add_epi8(acc, acc));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static float value(V v) { return static_cast<float>(_mm256_extract_epi32(v, 0)); }
};
#endif

#if defined(__AVX512F__)
struct Float32 {
  using V = __m512;
  static constexpr double kOps = 32;
  static V zero() { return _mm512_setzero_ps(); }
  static V step(V acc) { return _mm512_fmadd_ps(acc, _mm512_set1_ps(0.5f), _mm512_set1_ps(1)); }
  static float value(V v) { return _mm512_reduce_add_ps(v); }
};
#else
struct Float32 {
  using V = __m256;
  static constexpr double kOps = 16;
  static V zero() { return _mm256_setzero_ps(); }
  static V step(V acc) { return _mm256_fmadd_ps(acc, _mm256_set1_ps(0.5f), _mm256_set1_ps(1)); }
  static float value(V v) { return _mm256_cvtss_f32(v); }
};
#endif

#if defined(__AVX512BF16__)
struct Bf16 {
  using V = __m512;
  static constexpr double kOps = 64;
  static V zero() { return _mm512_setzero_ps(); }
  static V step(V acc) {
    const auto ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    return _mm512_dpbf16_ps(acc, ones, ones);
  }
  static float value(V v) { return _mm512_reduce_add_ps(v); }
};
#else
using Bf16 = Float32;  // expanded to float32 before it is multiplied
#endif

template <class Kind>
double gop_s(int threads) {
  constexpr int kSteps = 4'000'000;
  const double s = best_seconds(threads, [](int) {
#define BEGIN(one) auto one = Kind::zero();
#define STEP(one) one = Kind::step(one); asm volatile("" : "+v"(one));  // else the loop is folded
#define ADD(one) total += Kind::value(one);
    EACH(BEGIN)
    for (int step = 0; step < kSteps; ++step) {
      EACH(STEP)
    }
    float total = 0;
    EACH(ADD)
    sink = total;
  });
  return Kind::kOps * kChains * kSteps * threads / s / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 64) return 2;
  std::printf(
      "{\"threads\": %d, \"read_gb_s\": %.2f, \"int8_gop_s\": %.1f, \"bf16_gop_s\": %.1f, "
      "\"fp32_gop_s\": %.1f}\n",
      threads, read_gb_s(threads), gop_s<Int8>(threads), gop_s<Bf16>(threads),
      gop_s<Float32>(threads));
  return 0;
}
