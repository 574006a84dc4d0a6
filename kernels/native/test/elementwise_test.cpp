// Operations on rows: equal bits on every target for any length, near their formulas in double, and
// no byte beyond the row read or written.
#include "kernels.h"
#include "tests.h"

namespace pdserve {
namespace {

const float kAwkward[] = {0.0f, -0.0f, 88.8f, -88.8f, 1e-40f, -104.0f, 1e30f, -1e30f,
                          INFINITY, -INFINITY, NAN, 20.0f};
constexpr float kCap = 30.0f;

// Rows of one length; awkward numbers are not compared with formulas.
struct Rows {
  Guarded<float> a, b, c;

  Rows(Random& random, int64_t cols, bool awkward) : a(cols), b(cols), c(cols) {
    for (Guarded<float>* row : {&a, &b, &c}) {
      fill(random, row->data(), cols, 6);
      for (int64_t i = 0; awkward && i < cols; ++i) {
        if (random.below(3) == 0) (*row)[i] = kAwkward[random.below(12)];
      }
    }
  }
};

// What every operation makes of the rows, one result after the other.
Guarded<float> apply(const Kernels& kernels, const Rows& in) {
  const int64_t cols = in.a.size();
  const float *a = in.a.data(), *b = in.b.data(), *c = in.c.data();
  Guarded<float> out(9 * cols);
  float* y = out.data();
  kernels.rms_norm(a, nullptr, c, 1e-5f, cols, nullptr, y);
  kernels.rms_norm(a, b, c, 1e-5f, cols, y + cols, y + 2 * cols);
  kernels.gated(a, b, Activation::kSilu, cols, y + 3 * cols);
  kernels.gated(a, b, Activation::kGeluTanh, cols, y + 4 * cols);
  kernels.gated(a, b, Activation::kGelu, cols, y + 5 * cols);
  for (int k = 6; k < 9; ++k) std::memcpy(y + k * cols, a, cols * sizeof(float));
  kernels.soft_cap(y + 6 * cols, kCap, cols);
  kernels.scale(y + 7 * cols, 0.3f, cols);
  kernels.add_bias(y + 8 * cols, b, cols);
  return out;
}

void check_formulas(const Rows& in, const Guarded<float>& out) {
  const int64_t cols = in.a.size();
  double own = 0, summed = 0;
  for (int64_t i = 0; i < cols; ++i) {
    own += double{in.a[i]} * in.a[i];
    summed += (double{in.a[i]} + in.b[i]) * (double{in.a[i]} + in.b[i]);
  }
  for (int64_t i = 0; i < cols; ++i) {
    const double a = in.a[i], b = in.b[i], c = in.c[i];
    const double cubic = 0.79788456080286536 * (a + 0.044715 * a * a * a);
    const double tanh_gelu = 0.5 * a * (1 + std::tanh(cubic));
    const double want[] = {a / std::sqrt(own / cols + 1e-5) * c,
                           a + b,
                           (a + b) / std::sqrt(summed / cols + 1e-5) * c,
                           a / (1 + std::exp(-a)) * b,
                           tanh_gelu * b,
                           0.5 * a * (1 + std::erf(a / std::sqrt(2.0))) * b,
                           kCap * std::tanh(a / kCap),
                           a * 0.3,
                           a + b};
    for (int k = 0; k < 9; ++k) {
      float got = out[k * cols + i];
      CHECK(std::fabs(got - want[k]) <= 2e-5 * (1 + std::fabs(want[k])),
            "operation %d of %a, %a: %g, not %g", k, a, b, got, want[k]);
    }
  }
}

void check_rope(Random& random, int64_t heads, int64_t head_dim, int64_t half) {
  Guarded<float> x(heads * head_dim), cos(half), sin(half), expected(heads * head_dim);
  fill(random, x.data(), x.size());
  for (int64_t i = 0; i < half; ++i) {
    float angle = random.uniform() * 3;
    cos[i] = std::cos(angle);
    sin[i] = std::sin(angle);
  }
  std::memcpy(expected.data(), x.data(), x.size() * sizeof(float));
  generic_kernels().rope(expected.data(), cos.data(), sin.data(), heads, head_dim, half);
  for (int64_t i = 0; i < x.size(); ++i) {
    int64_t dim = i % head_dim, pair = dim < half ? dim : dim - half;
    double want = x[i];
    if (dim < half) want = double{x[i]} * cos[pair] - double{x[i + half]} * sin[pair];
    else if (dim < 2 * half) want = double{x[i]} * cos[pair] + double{x[i - half]} * sin[pair];
    CHECK(std::fabs(expected[i] - want) < 1e-6, "rope at %d: %g, not %g", static_cast<int>(i),
          expected[i], want);
  }
  for (const Kernels* target : targets()) {
    Guarded<float> y(x.size());
    std::memcpy(y.data(), x.data(), x.size() * sizeof(float));
    target->rope(y.data(), cos.data(), sin.data(), heads, head_dim, half);
    check_same(*target, "rope", y.data(), expected.data(), y.size());
  }
}

}  // namespace

void test_elementwise() {
  Random random(5);
  for (int64_t cols : {1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 576}) {
    for (bool awkward : {false, true}) {
      const Rows rows(random, cols, awkward);
      const Guarded<float> expected = apply(generic_kernels(), rows);
      if (!awkward) check_formulas(rows, expected);
      for (const Kernels* target : targets()) {
        const Guarded<float> got = apply(*target, rows);
        check_same(*target, "elementwise", got.data(), expected.data(), got.size());
      }
    }
  }
  for (int64_t half : {1, 4, 8, 15, 16, 24, 32}) {
    check_rope(random, 3, 2 * half, half);
    check_rope(random, 2, 2 * half + 5, half);
  }
}

}  // namespace pdserve
