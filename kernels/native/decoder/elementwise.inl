// Operations on rows of floats. Input and output may be the same row.

// Squares are summed per lane (16 lanes) in column order, then over the lanes.
static void rms_norm(const float* x, const float* residual, const float* weight, float eps,
                     int64_t cols, float* sum, float* y) {
  F squares = zero();
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F a = load_some(x + i, n);
    if (residual) a = add(a, load_some(residual + i, n));
    squares = fma(a, a, squares);
    if (sum) store_some(sum + i, a, n);
  });
  if (!y) return;
  float mean = reduce_add(squares) / (float)cols;
  F factor = set1(1.0f / __builtin_sqrtf(mean + eps));
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F a = load_some((sum ? sum : x) + i, n);
    if (residual && !sum) a = add(a, load_some(residual + i, n));
    store_some(y + i, mul(mul(a, factor), load_some(weight + i, n)), n);
  });
}

// Sums like rms_norm. The mean is loaded from memory, so that lanes beyond the row do not count.
static void layer_norm(const float* x, const float* weight, const float* bias, float eps,
                       int64_t cols, float* y) {
  F sums = zero();
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    sums = add(sums, load_some(x + i, n));
  });
  float means[kLanes];
  store(means, set1(reduce_add(sums) / (float)cols));
  F squares = zero();
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F a = sub(load_some(x + i, n), load_some(means, n));
    squares = fma(a, a, squares);
  });
  F factor = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)cols + eps));
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F a = mul(sub(load_some(x + i, n), load_some(means, n)), factor);
    a = mul(a, load_some(weight + i, n));
    store_some(y + i, bias ? add(a, load_some(bias + i, n)) : a, n);
  });
}

template <Activation kind>
PDS_INLINE F activate(F x) {
  if (kind == Activation::kSilu) return times_sigmoid(x, x);
  if (kind == Activation::kGeluTanh) {
    // (1 + tanh(u)) / 2 = sigmoid(2 u); u = sqrt(2 / pi) * (x + 0.044715 x^3).
    F cubic = fma(mul(x, x), mul(x, set1(0.044715f)), x);
    return times_sigmoid(x, mul(cubic, set1(1.5957691216f)));
  }
  if (kind == Activation::kRelu2) {
    F positive = max(zero(), x);  // returns the second operand if it is NaN
    return mul(positive, positive);
  }
  return mul(mul(x, set1(0.5f)), add(set1(1.0f), erf(mul(x, set1(0.70710678119f)))));
}

template <Activation kind>
static void gated_by(const float* gate, const float* up, int64_t cols, float* y) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, mul(activate<kind>(load_some(gate + i, n)), load_some(up + i, n)), n);
  });
}

// gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up in [-7, 7].
static void swiglu_oai(const float* gate, const float* up, int64_t cols, float* y) {
  const F limit = set1(7.0f);
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F g = min(limit, load_some(gate + i, n));  // min returns its second operand for NaN
    F u = max(sub(zero(), limit), min(limit, load_some(up + i, n)));
    F a = times_sigmoid(g, mul(g, set1(1.702f)));
    store_some(y + i, mul(a, add(u, set1(1.0f))), n);
  });
}

static void gated(const float* gate, const float* up, Activation kind, int64_t cols, float* y) {
  switch (kind) {
    case Activation::kSilu: return gated_by<Activation::kSilu>(gate, up, cols, y);
    case Activation::kGeluTanh: return gated_by<Activation::kGeluTanh>(gate, up, cols, y);
    case Activation::kGelu: return gated_by<Activation::kGelu>(gate, up, cols, y);
    case Activation::kRelu2: return gated_by<Activation::kRelu2>(gate, up, cols, y);
    case Activation::kSwigluOai: return swiglu_oai(gate, up, cols, y);
  }
}

template <Activation kind>
static void activated_by(const float* x, int64_t cols, float* y) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, activate<kind>(load_some(x + i, n)), n);
  });
}

static void activated(const float* x, Activation kind, int64_t cols, float* y) {
  switch (kind) {
    case Activation::kSilu: return activated_by<Activation::kSilu>(x, cols, y);
    case Activation::kGeluTanh: return activated_by<Activation::kGeluTanh>(x, cols, y);
    case Activation::kGelu: return activated_by<Activation::kGelu>(x, cols, y);
    case Activation::kRelu2: return activated_by<Activation::kRelu2>(x, cols, y);
    case Activation::kSwigluOai: break;  // not a function of one value
  }
}

// xIELU (arXiv:2411.13010): a x^2 + beta x above 0, else b (e^min(x, eps) - 1 - x) + beta x.
static void xielu(const float* x, const Xielu& curve, int64_t cols, float* y) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    F v = load_some(x + i, n);
    F above = mul(mul(v, v), set1(curve.a));
    F power = exp(min(set1(curve.eps), v));  // min returns its second operand for NaN
    F below = mul(sub(sub(power, set1(1.0f)), v), set1(curve.b));
    store_some(y + i, fma(v, set1(curve.beta), select(less(zero(), v), above, below)), n);
  });
}

static void sigmoid(float* y, int64_t cols) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, sigmoid(load_some(y + i, n)), n);
  });
}

static void exponential(float* y, int64_t cols) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, exp(load_some(y + i, n)), n);
  });
}

// Products are rounded before they are added, as in the reference.
static void rope(float* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim,
                 int64_t half) {
  for (int64_t head = 0; head < heads; ++head, x += head_dim) {
    each_vector(half, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      F c = load_some(cos + i, n), s = load_some(sin + i, n);
      F first = load_some(x + i, n), second = load_some(x + half + i, n);
      store_some(x + i, sub(mul(first, c), mul(second, s)), n);
      store_some(x + half + i, add(mul(second, c), mul(first, s)), n);
    });
  }
}

static void add_bias(float* y, const float* bias, int64_t cols) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, add(load_some(y + i, n), load_some(bias + i, n)), n);
  });
}

static void scale(float* y, float factor, int64_t cols) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, mul(load_some(y + i, n), set1(factor)), n);
  });
}

static void soft_cap(float* y, float cap, int64_t cols) {
  each_vector(cols, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_some(y + i, mul(set1(cap), tanh(div(load_some(y + i, n), set1(cap)))), n);
  });
}
