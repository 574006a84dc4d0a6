// Values into GGUF's block formats (ggml-common.h). Without instruction sets of their own: the same
// values give the same bytes on every machine.
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
  void (*write)(const float* values, uint8_t* block);  // one block of finite values
};

std::vector<std::string> quantized_formats();

// The format of that name. Throws std::invalid_argument with the names that exist.
const QuantizedFormat& quantized_format(const std::string& name);

// Writes whole blocks. False if a value is not finite, or too large for the float16 of a scale.
bool quantize(const QuantizedFormat& format, const float* values, int64_t count, uint8_t* out);

}  // namespace pdserve
