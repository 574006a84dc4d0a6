// Exact conversions between 16-bit numbers and floats, by arithmetic: not all compilers have the
// types.
#pragma once
#include <algorithm>

#include "base/common.h"

namespace pdserve {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float float_of_bf16(uint16_t bits) {
  return float_of_bits(static_cast<uint32_t>(bits) << 16);
}

inline float float_of_half(uint16_t half) {
  const uint32_t bits = half;
  const uint32_t sign = (bits & 0x8000) << 16, rest = (bits & 0x7FFF) << 13;
  if ((bits & 0x7C00) == 0) {  // 0 or subnormal: a multiple of 2^-24
    const float tiny = static_cast<float>(bits & 0x3FF) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const bool special = (bits & 0x7C00) == 0x7C00;  // infinity or NaN
  return float_of_bits(sign | (rest + (special ? 224u : 112u) * (1u << 23)));  // bias 15 to 127
}

// Sets `half` to the float16 that equals `value`; returns false if none does.
inline bool exact_half(float value, uint16_t& half) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 0xFF;
  const float steps = (sign ? -value : value) * 0x1p24f;  // in units of the subnormal numbers
  if (steps < 1024) {
    const auto whole = static_cast<uint32_t>(steps);
    half = static_cast<uint16_t>(sign | whole);
    return static_cast<float>(whole) == steps;
  }
  half = static_cast<uint16_t>(sign | (exponent - 112) << 10 | (bits >> 13 & 0x3FF));
  return exponent <= 142 && !(bits & 0x1FFF);
}

// Returns the nearest float16, ties to even; infinity beyond its range.
inline uint16_t half_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
  if (rest >= 0x7F800000) return static_cast<uint16_t>(sign | (rest > 0x7F800000 ? 0x7E00 : 0x7C00));
  if (rest < 113u << 23) {  // a multiple of 2^-24: the sum rounds it
    const float shifted = float_of_bits(rest) + 0.5f;
    uint32_t moved;
    std::memcpy(&moved, &shifted, 4);
    return static_cast<uint16_t>(sign | (moved - 0x3F000000));
  }
  const uint32_t rounded = rest - (112u << 23) + 0xFFF + (rest >> 13 & 1);
  return static_cast<uint16_t>(sign | std::min(rounded >> 13, 0x7C00u));
}

}  // namespace pdserve
