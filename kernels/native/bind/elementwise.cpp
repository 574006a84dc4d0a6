// Single operations on rows, with which tests compare a stack of parts bit for bit.
#include "bind.h"

#include <nanobind/stl/string.h>

#include "parts.h"

namespace {

using Rows = Array<float, 2>;
using ConstRows = Array<const float, 2>;
using ConstRow = Array<const float, 1>;

// Calls body(index of a row's first value) for every row of x, several rows per task.
template <class Body>
void each_row(Context& context, const ConstRows& x, const Body& body) {
  const auto rows = static_cast<int64_t>(x.shape(0)), cols = static_cast<int64_t>(x.shape(1));
  nb::gil_scoped_release release;
  const int64_t size = std::max<int64_t>(1, pdserve::ceil_div(rows, 8 * context.pool.threads()));
  context.pool.run(pdserve::ceil_div(rows, size), [&](int64_t piece, int) {
    for (int64_t r = piece * size; r < std::min(rows, (piece + 1) * size); ++r) body(r * cols);
  });
}

template <class A, class B>
void require_same(const A& a, const B& b, const char* message) {
  for (size_t i = 0; i < a.ndim(); ++i) require(a.shape(i) == b.shape(i), message);
}

}  // namespace

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm",
        [](Context& context, const ConstRows& x, const ConstRow& weight, float eps,
           const Rows& out) {
          require_same(x, out, "out must have the shape of x");
          require(weight.shape(0) == x.shape(1), "weight must have one value a column");
          each_row(context, x, [&](int64_t at) {
            context.kernels.rms_norm(x.data() + at, nullptr, weight.data(), eps,
                                     static_cast<int64_t>(x.shape(1)), nullptr, out.data() + at);
          });
        },
        nb::arg("context"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("eps"),
        nb::arg("out").noconvert(),
        "out = x / rms(x) * weight for each row; float32 [rows, cols].");
  m.def("layer_norm",
        [](Context& context, const ConstRows& x, const ConstRow& weight, const ConstRow& bias,
           float eps, const Rows& out) {
          require_same(x, out, "out must have the shape of x");
          require(weight.shape(0) == x.shape(1), "weight must have one value a column");
          require(bias.shape(0) == x.shape(1), "bias must have one value a column");
          each_row(context, x, [&](int64_t at) {
            context.kernels.layer_norm(x.data() + at, weight.data(), bias.data(), eps,
                                       static_cast<int64_t>(x.shape(1)), out.data() + at);
          });
        },
        nb::arg("context"), nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
        nb::arg("bias").noconvert(), nb::arg("eps"), nb::arg("out").noconvert(),
        "out = (x - mean) / deviation * weight + bias for each row; float32 [rows, cols].");
  m.def("gated",
        [](Context& context, const ConstRows& gate, const ConstRows& up, const std::string& name,
           const Rows& out) {
          require_same(gate, up, "gate and up must have one shape");
          require_same(gate, out, "out must have the shape of gate");
          const pdserve::Activation kind = gating_of(name);
          each_row(context, gate, [&](int64_t at) {
            context.kernels.gated(gate.data() + at, up.data() + at, kind,
                                  static_cast<int64_t>(gate.shape(1)), out.data() + at);
          });
        },
        nb::arg("context"), nb::arg("gate").noconvert(), nb::arg("up").noconvert(),
        nb::arg("activation"), nb::arg("out").noconvert(),
        "out = activation(gate) * up; float32 [rows, cols].");
}
