// Operations on rows: equal bits on every target for any length, close to their formulas in double
// or rounded exactly as defined, also in place, without access beyond the row.
#include <algorithm>

#include "kernels.h"

namespace pdserve {
namespace {

const float kAwkward[] = {0.0f, -0.0f, 88.8f, -88.8f, 1e-40f, -104.0f, 1e30f, -1e30f,
                          INFINITY, -INFINITY, NAN, 20.0f};
constexpr float kCap = 30.0f;
constexpr Xielu kCurve = {0.7f, 0.9f, 0.4f, -1e-6f};

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

// Returns the results of all operations on the rows, one after the other.
Guarded<float> apply(const Kernels& kernels, const Rows& in) {
  const int64_t cols = in.a.size();
  const float *a = in.a.data(), *b = in.b.data(), *c = in.c.data();
  Guarded<float> out(15 * cols);
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
  kernels.layer_norm(a, c, b, 1e-5f, cols, y + 9 * cols);
  kernels.layer_norm(a, c, nullptr, 1e-5f, cols, y + 10 * cols);
  kernels.activated(a, Activation::kGeluTanh, cols, y + 11 * cols);
  kernels.gated(a, b, Activation::kSwigluOai, cols, y + 12 * cols);
  kernels.activated(a, Activation::kRelu2, cols, y + 13 * cols);
  kernels.xielu(a, kCurve, cols, y + 14 * cols);
  return out;
}

void check_formulas(const Rows& in, const Guarded<float>& out) {
  const int64_t cols = in.a.size();
  double own = 0, summed = 0, mean = 0, variance = 0;
  for (int64_t i = 0; i < cols; ++i) mean += double{in.a[i]} / cols;
  for (int64_t i = 0; i < cols; ++i) {
    variance += (in.a[i] - mean) * (in.a[i] - mean) / cols;
    own += double{in.a[i]} * in.a[i];
    summed += (double{in.a[i]} + in.b[i]) * (double{in.a[i]} + in.b[i]);
  }
  for (int64_t i = 0; i < cols; ++i) {
    const double a = in.a[i], b = in.b[i], c = in.c[i];
    const double cubic = 0.79788456080286536 * (a + 0.044715 * a * a * a);
    const double cut = std::min(a, 7.0), glu = cut / (1 + std::exp(-1.702 * cut));
    const double tanh_gelu = 0.5 * a * (1 + std::tanh(cubic));
    const double below = kCurve.b * (std::expm1(std::min<double>(a, kCurve.eps)) - a);
    const double want[] = {a / std::sqrt(own / cols + 1e-5) * c,
                           a + b,
                           (a + b) / std::sqrt(summed / cols + 1e-5) * c,
                           a / (1 + std::exp(-a)) * b,
                           tanh_gelu * b,
                           0.5 * a * (1 + std::erf(a / std::sqrt(2.0))) * b,
                           kCap * std::tanh(a / kCap),
                           a * 0.3,
                           a + b,
                           (a - mean) / std::sqrt(variance + 1e-5) * c + b,
                           (a - mean) / std::sqrt(variance + 1e-5) * c,
                           tanh_gelu,
                           glu * (std::clamp(b, -7.0, 7.0) + 1),
                           a > 0 ? a * a : 0,
                           (a > 0 ? kCurve.a * a * a : below) + kCurve.beta * a};
    for (int k = 0; k < 15; ++k) {
      float got = out[k * cols + i];
      CHECK(std::fabs(got - want[k]) <= 2e-5 * (1 + std::fabs(want[k])),
            "operation %d of %a, %a: %g, not %g", k, a, b, got, want[k]);
    }
  }
}

// Operations with one or two roundings are exact; the norm of a sum is within a few units.
void check_roundings(const Rows& in, const Guarded<float>& out) {
  const int64_t cols = in.a.size();
  double squares = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const float sum = in.a[i] + in.b[i];
    squares += double{sum} * sum;
    const float* row = out.data() + i;
    CHECK(row[cols] == sum && row[8 * cols] == sum && row[7 * cols] == in.a[i] * 0.3f,
          "a sum or a product of %a and %a is rounded otherwise", in.a[i], in.b[i]);
  }
  for (int64_t i = 0; i < cols; ++i) {
    const double want = double{out[cols + i]} / std::sqrt(squares / cols + 1e-5) * in.c[i];
    CHECK(std::fabs(out[2 * cols + i] - want) <= 2e-6 * std::fabs(want), "norm: %a, not %a",
          out[2 * cols + i], want);
  }
}

// In place, the norm of a sum equals its result out of place, and the norm of the stored sum.
void check_in_place(const Rows& in, const Guarded<float>& out) {
  const int64_t cols = in.a.size();
  for (const Kernels* target : targets()) {
    Guarded<float> x(cols), residual(cols), apart(cols);
    std::memcpy(x.data(), in.a.data(), cols * sizeof(float));
    std::memcpy(residual.data(), in.b.data(), cols * sizeof(float));
    target->rms_norm(x.data(), residual.data(), in.c.data(), 1e-5f, cols, residual.data(),
                     x.data());
    check_same(*target, "sum in place", residual.data(), out.data() + cols, cols);
    check_same(*target, "norm in place", x.data(), out.data() + 2 * cols, cols);
    target->rms_norm(residual.data(), nullptr, in.c.data(), 1e-5f, cols, nullptr, apart.data());
    check_same(*target, "norm of the sum", apart.data(), x.data(), cols);
  }
}

// tanh in the soft cap, to a few units over all magnitudes.
void check_soft_cap() {
  constexpr int64_t kSteps = 40001;
  for (float cap : {1.0f, 50.0f}) {
    for (double size : {1e-30, 1e-3, 0.62, 0.64, 12.0}) {
      Guarded<float> x(kSteps), expected(kSteps);
      for (int64_t i = 0; i < kSteps; ++i) {
        expected[i] = x[i] = static_cast<float>(size * (2.0 * i / (kSteps - 1) - 1)) * cap;
      }
      generic_kernels().soft_cap(expected.data(), cap, kSteps);
      for (int64_t i = 0; i < kSteps; ++i) {
        const double want = cap * std::tanh(double{x[i]} / cap);
        CHECK(std::fabs(expected[i] - want) <= 5e-7 * std::fabs(want), "cap %g of %a: %a, not %a",
              cap, x[i], expected[i], want);
      }
      for (const Kernels* target : targets()) {
        Guarded<float> y(kSteps);
        std::memcpy(y.data(), x.data(), kSteps * sizeof(float));
        target->soft_cap(y.data(), cap, kSteps);
        check_same(*target, "soft cap", y.data(), expected.data(), kSteps);
      }
    }
  }
}

// Sigmoid and the exponential, to a few units over all magnitudes.
void check_exponentials() {
  constexpr int64_t kSteps = 20001;
  for (double size : {1e-30, 1e-3, 1.0, 80.0}) {
    Guarded<float> x(kSteps), expected(2 * kSteps);
    for (int64_t i = 0; i < kSteps; ++i) {
      x[i] = static_cast<float>(size * (2.0 * i / (kSteps - 1) - 1));
      expected[i] = expected[kSteps + i] = x[i];
    }
    generic_kernels().sigmoid(expected.data(), kSteps);
    generic_kernels().exponential(expected.data() + kSteps, kSteps);
    for (int64_t i = 0; i < kSteps; ++i) {
      const double power = std::exp(double{x[i]}), wanted[] = {power / (1 + power), power};
      for (int k = 0; k < 2; ++k) {
        const double got = expected[k * kSteps + i];
        CHECK(std::fabs(got - wanted[k]) <= 5e-7 * wanted[k], "%d of %a: %a, not %a", k, x[i], got,
              wanted[k]);
      }
    }
    for (const Kernels* target : targets()) {
      Guarded<float> y(2 * kSteps);
      std::memcpy(y.data(), x.data(), kSteps * sizeof(float));
      std::memcpy(y.data() + kSteps, x.data(), kSteps * sizeof(float));
      target->sigmoid(y.data(), kSteps);
      target->exponential(y.data() + kSteps, kSteps);
      check_same(*target, "exponentials", y.data(), expected.data(), 2 * kSteps);
    }
  }
}

float product(float a, float b) { return static_cast<float>(double{a} * b); }  // never fused

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
    float want = x[i];  // products are rounded before they are added, as in the reference
    if (dim < half) want = product(x[i], cos[pair]) - product(x[i + half], sin[pair]);
    else if (dim < 2 * half) want = product(x[i], cos[pair]) + product(x[i - half], sin[pair]);
    CHECK(expected[i] == want, "rope at %d: %a, not %a", static_cast<int>(i), expected[i], want);
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
      if (!awkward) check_roundings(rows, expected);
      check_in_place(rows, expected);
      for (const Kernels* target : targets()) {
        const Guarded<float> got = apply(*target, rows);
        check_same(*target, "elementwise", got.data(), expected.data(), got.size());
      }
    }
  }
  check_soft_cap();
  check_exponentials();
  for (int64_t half : {1, 4, 8, 15, 16, 24, 32}) {
    check_rope(random, 3, 2 * half, half);
    check_rope(random, 2, 2 * half + 5, half);
  }
}

}  // namespace pdserve
