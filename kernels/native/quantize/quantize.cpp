#include "quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "base/half.h"

namespace pdserve {
namespace {

constexpr float kTiny = 1e-30f;  // far below the least float16; its inverse is finite
constexpr float kLargest = 65504;  // of float16, so that every scale and minimum is representable

// Writes the nearest float16 and returns its value.
float put_half(float value, uint8_t* at) {
  const uint16_t half = half_of_float(value);
  std::memcpy(at, &half, 2);
  return float_of_half(half);
}

#include "quantize/blocks32.inl"
#include "quantize/blocks256.inl"

constexpr QuantizedFormat kFormats[] = {
    {"Q4_0", 32, 18, write_0<4>},       {"Q4_1", 32, 20, write_1<4>},
    {"Q5_0", 32, 22, write_0<5>},       {"Q5_1", 32, 24, write_1<5>},
    {"Q8_0", 32, 34, write_q8_0},       {"Q2_K", 256, 84, write_q2_k},
    {"Q3_K", 256, 110, write_q3_k},     {"Q4_K", 256, 144, write_q45_k<4>},
    {"Q5_K", 256, 176, write_q45_k<5>}, {"Q6_K", 256, 210, write_q6_k},
};

}  // namespace

std::vector<std::string> quantized_formats() {
  std::vector<std::string> names;
  for (const QuantizedFormat& format : kFormats) names.emplace_back(format.name);
  return names;
}

const QuantizedFormat& quantized_format(const std::string& name) {
  std::string known;
  for (const QuantizedFormat& format : kFormats) {
    if (name == format.name) return format;
    known += std::string(known.empty() ? "" : ", ") + format.name;
  }
  throw std::invalid_argument("nothing is quantized to '" + name + "'; known: " + known);
}

bool quantize(const QuantizedFormat& format, const float* values, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(std::fabs(values[i]) <= kLargest)) return false;
  }
  for (int64_t i = 0; i < count; i += format.block_values, out += format.block_bytes) {
    format.write(values + i, out);
  }
  return true;
}

}  // namespace pdserve
