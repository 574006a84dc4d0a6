// Quantization to GGUF's block formats (ggml-common.h). Uses no special instruction sets, so the
// same values give the same bytes on every machine.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pdserve {

// A format that values can be quantized to.
struct QuantizedFormat {
  const char* name;  // GGUF's
  int64_t block_values;
  int64_t block_bytes;
  void (*write)(const float* values, uint8_t* block);  // writes one block of finite values
};

std::vector<std::string> quantized_formats();

// Returns a format by name. Throws std::invalid_argument with the known names.
const QuantizedFormat& quantized_format(const std::string& name);

// Writes whole blocks. Returns false if a value is not finite or too large for a float16 scale.
bool quantize(const QuantizedFormat& format, const float* values, int64_t count, uint8_t* out);

}  // namespace pdserve
