// Matrix, products with it, and quantization of values to the block formats that it can pack.
#include "linear/linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind.h"
#include "linear/pack.h"
#include "quantize/quantize.h"

using pdserve::Activations;
using pdserve::Layout;
using pdserve::Addend;
using pdserve::Matrix;
using pdserve::Scales;

namespace {

using Numbers = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// Returns a new Python array that owns its memory.
Numbers new_array(int64_t rows, int64_t cols) {
  auto memory = aligned<float>(rows * cols);
  if (!memory) throw std::bad_alloc();
  float* data = memory.release();
  nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return Numbers(data, {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner);
}

std::string layout_name(const Matrix& m) {
  std::string name;
  switch (m.layout) {
    case Layout::kBf16: return "bf16";
    case Layout::kF16: return "f16";
    case Layout::kF32: return "f32";
    case Layout::kF8: name = "f8"; break;
    case Layout::kFp4: name = "fp4"; break;
    case Layout::kIq4: name = "iq4"; break;
    case Layout::kU4:
    case Layout::kU5:
    case Layout::kU8:
    case Layout::kU2:
    case Layout::kU3:
    case Layout::kU6: name = "u" + std::to_string(pdserve::quant_bits(m.layout));
  }
  static constexpr const char* kScales[] = {" f16", " bf16", " f32", " i8 f16", " e4m3 f32"};
  const char* scales = kScales[static_cast<int>(m.scales)];
  const char* addend = m.addend == Addend::kMinima  ? " scales and minima"
                       : m.addend == Addend::kZeros ? " scales and zeros" : " scales";
  return name + " group " + std::to_string(m.group) + scales + addend;
}

Matrix pack(Context& context, const std::string& format, const Array<const uint8_t, 2>& data,
            int64_t rows, int64_t cols) {
  const auto& stored = pdserve::stored_format(format);
  require(static_cast<int64_t>(data.shape(0)) == rows, "data has one row of bytes a row");
  nb::gil_scoped_release unlocked;
  return pdserve::pack(context.pool, stored, data.data(), static_cast<int64_t>(data.size()), rows,
                       cols);
}

// The formats that pack_groups accepts.
struct GroupedFormat {
  const char* name;
  Layout layout;
  int bits;
};

constexpr GroupedFormat kGrouped[] = {{"INT4", Layout::kU4, 4},
                                      {"INT8", Layout::kU8, 8},
                                      {"FP8", Layout::kF8, 8},
                                      {"FP4", Layout::kFp4, 4}};

std::vector<std::string> grouped_formats() {
  std::vector<std::string> names;
  for (const GroupedFormat& format : kGrouped) names.emplace_back(format.name);
  return names;
}

const GroupedFormat& grouped_format(const std::string& name) {
  for (const GroupedFormat& format : kGrouped) {
    if (name == format.name) return format;
  }
  throw std::invalid_argument("no packed layout for groups of '" + name + "'");
}

Scales scales_type(const std::string& type) {
  if (type == "F16") return Scales::kF16;
  if (type == "BF16") return Scales::kBf16;
  if (type == "E4M3") return Scales::kE4m3;
  require(type == "F32", "scales must be F16, BF16, F32 or E4M3");
  return Scales::kF32;
}

Matrix pack_groups(Context& context, const std::string& name,
                   const Array<const uint8_t, 2>& codes, const std::string& type,
                   const Array<const uint8_t, 2>& scales,
                   const std::optional<Array<const uint8_t, 2>>& zeros,
                   const std::optional<Array<const float, 1>>& divisors) {
  const GroupedFormat& format = grouped_format(name);
  pdserve::Grouped from{};
  from.layout = format.layout;
  from.scales = scales_type(type);
  const auto size = static_cast<size_t>(pdserve::scale_bytes(from.scales));
  from.rows = static_cast<int64_t>(codes.shape(0));
  from.cols = static_cast<int64_t>(codes.shape(1)) * 8 / format.bits;
  from.groups = static_cast<int64_t>(scales.shape(1) / size);
  require(scales.shape(0) == codes.shape(0) && scales.shape(1) % size == 0,
          "scales has one row of whole numbers a row of codes");
  if (zeros) {
    require(from.layout == Layout::kU4 || from.layout == Layout::kU8, "floats have no zeros");
    require(zeros->shape(0) == codes.shape(0) &&
                static_cast<int64_t>(zeros->shape(1)) == from.groups,
            "zeros has one byte a scale");
    from.zeros = zeros->data();
  }
  require((from.layout == Layout::kFp4) == (from.scales == Scales::kE4m3) &&
              (from.layout == Layout::kFp4) == divisors.has_value(),
          "FP4, and no other, has E4M3 scales and divisors");
  require(!divisors || divisors->size() == codes.shape(0), "divisors has one number a row");
  if (divisors) from.divisors = divisors->data();
  from.codes = codes.data();
  from.d = scales.data();
  nb::gil_scoped_release unlocked;
  return pdserve::pack_groups(context.pool, from);
}

Numbers row_values(const Matrix& m, Context& context, const Array<const int64_t, 1>& ids) {
  const int64_t count = static_cast<int64_t>(ids.size());
  const int64_t* id = ids.data();
  require(std::all_of(id, id + count, [&](int64_t i) { return i >= 0 && i < m.rows; }),
          "a row id is outside the matrix");
  Numbers out = new_array(count, m.cols);
  float* values = out.data();
  nb::gil_scoped_release unlocked;
  context.pool.run(count, [&](int64_t i, int) {
    context.kernels.matrix_row(m, id[i], values + i * m.cols);
  });
  return out;
}

// Returns the sizes of a product. Throws if the arguments do not match.
int64_t outputs_of(const Array<const float, 2>& x, const std::vector<const Matrix*>& matrices,
                   const std::optional<Array<const float, 1>>& bias) {
  require(!matrices.empty(), "a product needs a matrix");
  int64_t outputs = 0;
  for (const Matrix* m : matrices) {
    require(m != nullptr, "a matrix is None");
    require(m->cols == static_cast<int64_t>(x.shape(1)), "x has other columns than a matrix");
    outputs += m->rows;
  }
  require(!bias || static_cast<int64_t>(bias->size()) == outputs,
          "bias has one value an output of all matrices");
  return outputs;
}

void multiply(Context& context, const Array<const float, 2>& x,
              const std::vector<const Matrix*>& matrices,
              const std::optional<Array<const float, 1>>& bias, float* y, int64_t outputs) {
  Activations in;
  in.rows = static_cast<int64_t>(x.shape(0));
  in.cols = static_cast<int64_t>(x.shape(1));
  in.f32 = x.data();
  for (const Matrix* m : matrices) in.needs |= pdserve::encoding_of(*m);
  auto buffer = aligned<uint8_t>(pdserve::encoding_bytes(in));
  if (!buffer) throw std::bad_alloc();
  pdserve::place(in, buffer.get());
  const float* added = bias ? bias->data() : nullptr;
  nb::gil_scoped_release unlocked;
  pdserve::run_encode(context.pool, context.kernels, in);
  pdserve::run_linear(context.pool, context.kernels, matrices.data(),
                      static_cast<int>(matrices.size()), in, y, outputs, added);
}

bool quantize_into(const std::string& format, const Array<const float, 2>& values,
                   const Array<uint8_t, 2>& out) {
  const auto& quantized = pdserve::quantized_format(format);
  const auto cols = static_cast<int64_t>(values.shape(1));
  require(cols % quantized.block_values == 0, "a row is no whole number of blocks");
  require(out.shape(0) == values.shape(0) &&
              static_cast<int64_t>(out.shape(1)) ==
                  cols / quantized.block_values * quantized.block_bytes,
          "out is not [rows, bytes of a row]");
  nb::gil_scoped_release unlocked;
  return pdserve::quantize(quantized, values.data(), static_cast<int64_t>(values.size()),
                           out.data());
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix", "Weights packed for the kernels; immutable.")
      .def_static("pack", &pack, nb::arg("context"), nb::arg("format"), nb::arg("data").noconvert(),
                  nb::arg("rows"), nb::arg("cols"),
                  "format: GGUF's name of the type; data: uint8 [rows, bytes of a row] as stored.\n"
                  "ValueError if the format has no layout or the sizes do not fit.")
      .def_static("pack_groups", &pack_groups, nb::arg("context"), nb::arg("format"),
                  nb::arg("codes").noconvert(), nb::arg("type"), nb::arg("scales").noconvert(),
                  nb::arg("zeros").noconvert() = nb::none(),
                  nb::arg("divisors").noconvert() = nb::none(),
                  "format: INT4, INT8, FP8 (e4m3) or FP4 (e2m1); codes: uint8 [rows, bytes of a\n"
                  "row], of 4 bits the first in the low nibble; scales: one number of `type` (F16,\n"
                  "BF16, F32; E4M3 of FP4) for each group of a row's columns, as uint8 [rows,\n"
                  "bytes]; zeros: uint8 [rows, groups], without which integers are less 8 or 128;\n"
                  "divisors: float32 [rows], of FP4. A value is (level - zero) * (scale / divisor).\n"
                  "Groups of integers are multiples of 32 columns (of INT8 without zeros also 16, an\n"
                  "even number of them), those of FP4 16, an even number. ValueError if sizes do not\n"
                  "fit, an 8-bit float is NaN, a scale is not finite (of FP8: not below 2^119), or a\n"
                  "divisor is not finite or below 2^-116.")
      .def_prop_ro("rows", [](const Matrix& self) { return self.rows; })
      .def_prop_ro("cols", [](const Matrix& self) { return self.cols; })
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro("layout", &layout_name)
      .def("row_values", &row_values, nb::arg("context"), nb::arg("ids"),
           "The weights of rows `ids` (int64 [n]) as float32 [n, cols], exactly as stored.\n"
           "ValueError if an id is outside.");

  m.def("formats", &pdserve::stored_formats, "The formats that Matrix.pack takes.");
  m.def("grouped_formats", &grouped_formats, "The formats that Matrix.pack_groups takes.");
  m.def("quantized_formats", &pdserve::quantized_formats, "The formats that quantize_into takes.");
  m.def("quantize_into", &quantize_into, nb::arg("format"), array("values"), array("out"),
        "Writes float32 values [rows, cols] as blocks of a GGUF type: out is uint8 [rows, bytes of\n"
        "a row]. False, and out is of no use, if a value is not finite or beyond 65504. ValueError\n"
        "if sizes do not fit.");
  m.def(
      "linear_into",
      [](Context& context, const Array<const float, 2>& x,
         const std::vector<const Matrix*>& matrices, const Array<float, 2>& out,
         const std::optional<Array<const float, 1>>& bias) {
        const int64_t outputs = outputs_of(x, matrices, bias);
        require(out.shape(0) == x.shape(0) && static_cast<int64_t>(out.shape(1)) == outputs,
                "out is not [rows of x, rows of all matrices]");
        multiply(context, x, matrices, bias, out.data(), outputs);
      },
      nb::arg("context"), nb::arg("x").noconvert(), nb::arg("matrices"), nb::arg("out").noconvert(),
      nb::arg("bias") = nb::none(),
      "Writes x [T, N] times each matrix transposed, side by side, plus bias: out is float32\n"
      "[T, sum of rows]. A row of it depends on the same row of x alone, to the last bit.");
}
