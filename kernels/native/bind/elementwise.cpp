// Operations on rows, each by itself, as kernels/ops.py defines them; results go into `out`, which
// may be an input.
#include "bind.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>

using pdserve::Activation;

namespace {

using Rows = Array<float, 2>;
using ConstRows = Array<const float, 2>;
using ConstRow = Array<const float, 1>;

// body(row) for every row, some rows at a time.
template <class Body>
void each_row(Context& context, int64_t rows, const Body& body) {
  nb::gil_scoped_release release;
  int64_t size = std::max<int64_t>(1, pdserve::ceil_div(rows, 8 * context.pool.threads()));
  context.pool.run(pdserve::ceil_div(rows, size), [&](int64_t piece, int) {
    for (int64_t r = piece * size; r < std::min(rows, (piece + 1) * size); ++r) body(r);
  });
}

template <class A, class B>
void require_same(const A& a, const B& b, const char* message) {
  for (size_t i = 0; i < a.ndim(); ++i) require(a.shape(i) == b.shape(i), message);
}

void norm(Context& context, const ConstRows& x, const float* residual, const ConstRow& weight,
          float eps, float* sum, const Rows& out) {
  require_same(x, out, "out must have the shape of x");
  require(weight.shape(0) == x.shape(1), "weight must have one value a column");
  int64_t cols = static_cast<int64_t>(x.shape(1));
  each_row(context, static_cast<int64_t>(x.shape(0)), [&](int64_t r) {
    context.kernels.rms_norm(x.data() + r * cols, residual ? residual + r * cols : nullptr,
                             weight.data(), eps, cols, sum ? sum + r * cols : nullptr,
                             out.data() + r * cols);
  });
}

void rope(Context& context, const Array<const float, 3>& x,
          const Array<const int64_t, 1>& positions, const ConstRows& cos, const ConstRows& sin,
          const Array<float, 3>& out) {
  require_same(x, out, "out must have the shape of x");
  require_same(cos, sin, "cos and sin must have one shape");
  require(positions.shape(0) == x.shape(0), "positions must have one value a token");
  int64_t heads = static_cast<int64_t>(x.shape(1)), head_dim = static_cast<int64_t>(x.shape(2));
  int64_t half = static_cast<int64_t>(cos.shape(1));
  require(2 * half <= head_dim, "cos and sin rotate more dims than a head has");
  for (size_t t = 0; t < positions.shape(0); ++t) {
    int64_t position = positions.data()[t];
    require(position >= 0 && position < static_cast<int64_t>(cos.shape(0)),
            "a position is outside of cos and sin");
  }
  each_row(context, static_cast<int64_t>(x.shape(0)), [&](int64_t t) {
    int64_t size = heads * head_dim, at = positions.data()[t] * half;
    float* row = out.data() + t * size;
    std::memmove(row, x.data() + t * size, static_cast<size_t>(size) * sizeof(float));
    context.kernels.rope(row, cos.data() + at, sin.data() + at, heads, head_dim, half);
  });
}

// Row by row in pieces of whole rows: for functions that change y in place.
template <class Body>
void in_place(Context& context, const Rows& y, const Body& body) {
  int64_t cols = static_cast<int64_t>(y.shape(1));
  each_row(context, static_cast<int64_t>(y.shape(0)),
           [&](int64_t r) { body(y.data() + r * cols, cols); });
}

}  // namespace

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  throw std::invalid_argument("activation must be silu, gelu_tanh or gelu, not '" + name + "'");
}

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm",
        [](Context& context, const ConstRows& x, const ConstRow& weight, float eps,
           const Rows& out) { norm(context, x, nullptr, weight, eps, nullptr, out); },
        nb::arg("context"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
        nb::arg("out").noconvert(),
        "out = x / rms(x) * weight for each row; float32 [rows, cols].");
  m.def("add_rms_norm",
        [](Context& context, const ConstRows& x, const ConstRows& residual, const ConstRow& weight,
           float eps, const Rows& out, const Rows& sum) {
          require_same(x, residual, "residual must have the shape of x");
          require_same(x, sum, "sum must have the shape of x");
          norm(context, x, residual.data(), weight, eps, sum.data(), out);
        },
        nb::arg("context"), nb::arg("x").noconvert(), nb::arg("residual").noconvert(),
        nb::arg("weight").noconvert(), nb::arg("eps"), nb::arg("out").noconvert(),
        nb::arg("sum").noconvert(),
        "sum = x + residual, out = rms_norm(sum).");
  m.def("gated",
        [](Context& context, const ConstRows& gate, const ConstRows& up, const std::string& name,
           const Rows& out) {
          require_same(gate, up, "gate and up must have one shape");
          require_same(gate, out, "out must have the shape of gate");
          Activation kind = activation_of(name);
          int64_t cols = static_cast<int64_t>(gate.shape(1));
          each_row(context, static_cast<int64_t>(gate.shape(0)), [&](int64_t r) {
            context.kernels.gated(gate.data() + r * cols, up.data() + r * cols, kind, cols,
                                  out.data() + r * cols);
          });
        },
        nb::arg("context"), nb::arg("gate").noconvert(), nb::arg("up").noconvert(),
        nb::arg("activation"), nb::arg("out").noconvert(),
        "out = activation(gate) * up; float32 [rows, cols].");
  m.def("rope", &rope, nb::arg("context"), nb::arg("x").noconvert(),
        nb::arg("positions").noconvert(), nb::arg("cos").noconvert(), nb::arg("sin").noconvert(),
        nb::arg("out").noconvert(),
        "x, out float32 [tokens, heads, head_dim]; positions int64 [tokens]; cos, sin float32\n"
        "[positions, R / 2]: the first R dims of each head are rotated.");
  m.def("add_bias",
        [](Context& context, const Rows& y, const ConstRow& bias) {
          require(bias.shape(0) == y.shape(1), "bias must have one value a column");
          in_place(context, y, [&](float* row, int64_t cols) {
            context.kernels.add_bias(row, bias.data(), cols);
          });
        },
        nb::arg("context"), nb::arg("y").noconvert(), nb::arg("bias").noconvert(),
        "y += bias for each row.");
  m.def("scale",
        [](Context& context, const Rows& y, float factor) {
          in_place(context, y, [&](float* row, int64_t cols) {
            context.kernels.scale(row, factor, cols);
          });
        },
        nb::arg("context"), nb::arg("y").noconvert(), nb::arg("factor"),
        "y *= factor.");
  m.def("soft_cap",
        [](Context& context, const Rows& y, float cap) {
          require(cap > 0 && std::isfinite(cap), "cap must be positive and finite");
          in_place(context, y, [&](float* row, int64_t cols) {
            context.kernels.soft_cap(row, cap, cols);
          });
        },
        nb::arg("context"), nb::arg("y").noconvert(), nb::arg("cap"),
        "y = cap * tanh(y / cap).");
}
