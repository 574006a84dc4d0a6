// Values into GGUF's block formats.
#include "quantize/quantize.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace {

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

void bind_quantize(nb::module_& m) {
  m.def("quantized_formats", &pdserve::quantized_formats, "The formats that quantize_into takes.");
  m.def("quantize_into", &quantize_into, nb::arg("format"), array("values"), array("out"),
        "Writes float32 values [rows, cols] as blocks of a GGUF type: out is uint8 [rows, bytes of\n"
        "a row]. False, and out is of no use, if a value is not finite or beyond 65504. ValueError\n"
        "if sizes do not fit.");
}
