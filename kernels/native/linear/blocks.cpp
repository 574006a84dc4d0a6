#include "linear/blocks.h"

#include <cstring>
#include <stdexcept>

namespace pdserve {

namespace {

uint32_t word(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

uint16_t half_bits(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

constexpr uint32_t kSigns = 0x80808080;

// Returns a word whose byte k is `set` if bit `at` + k of the mask is 1, else 0.
uint32_t spread(uint32_t mask, int at, uint32_t set) {
  const uint32_t nibble = mask >> at & 15;
  return (nibble & 1) * set | (nibble & 2) * (set << 7) | (nibble & 4) * (set << 14) |
         (nibble & 8) * (set << 21);
}

uint16_t negated(uint16_t half) { return half ^ 0x8000; }

void read_nibbles(const uint8_t* at, Block& out) {
  for (int j = 0; j < 4; ++j) out.q[j] = word(at + 4 * j);
}

// Also for IQ4_NL, whose nibbles are indices of other levels.
void read_q4_0(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 18;
  out.d[0] = half_bits(block);
  read_nibbles(block + 2, out);
}

void read_q4_1(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 20;
  out.d[0] = half_bits(block);
  out.m = half_bits(block + 2);
  read_nibbles(block + 4, out);
}

// Reads fifth bits at `at` and the nibbles after them.
void read_five(const uint8_t* at, Block& out) {
  const uint32_t fifth = word(at);
  for (int j = 0; j < 4; ++j) {
    const uint32_t both = word(at + 4 + 4 * j);
    out.q[j] = (both & kLowNibbles) | spread(fifth, 4 * j, 16);
    out.q[j + 4] = (both >> 4 & kLowNibbles) | spread(fifth, 16 + 4 * j, 16);
  }
}

void read_q5_0(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 22;
  out.d[0] = half_bits(block);
  read_five(block + 2, out);
}

void read_q5_1(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 24;
  out.d[0] = half_bits(block);
  out.m = half_bits(block + 2);
  read_five(block + 4, out);
}

void read_q8_0(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 34;
  out.d[0] = half_bits(block);
  for (int j = 0; j < 8; ++j) out.q[j] = word(block + 2 + 4 * j) ^ kSigns;
}

// One of the eight parts of 32 values in a block of 256; four parts share one run of 2-bit fields.
struct Part {
  int number, pair, shift;
  explicit Part(int64_t b)
      : number(static_cast<int>(b % 8)), pair(number / 4), shift(number % 4 * 2) {}
};

void read_q2_k(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 84;
  const Part part(b);
  for (int j = 0; j < 8; ++j) {
    out.q[j] = word(block + 16 + 32 * part.pair + 4 * j) >> part.shift & 0x03030303;
  }
  for (int h = 0; h < 2; ++h) {
    const uint8_t scales = block[2 * part.number + h];
    out.code_d[h] = static_cast<int8_t>(scales & 15);
    out.code_m[h] = static_cast<int8_t>(scales >> 4);
  }
  out.d[0] = half_bits(block + 80);
  out.m = negated(half_bits(block + 82));
}

void read_q3_k(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 110;
  const Part part(b);
  for (int j = 0; j < 8; ++j) {
    const uint32_t low = word(block + 32 + 32 * part.pair + 4 * j) >> part.shift & 0x03030303;
    const uint32_t top = word(block + 4 * j) >> part.number & 0x01010101;
    out.q[j] = low | top << 2;
  }
  for (int h = 0; h < 2; ++h) {
    const int g = 2 * part.number + h;
    const int low = block[96 + g % 8] >> (g < 8 ? 0 : 4) & 15;
    const int high = block[104 + g % 4] >> (g / 4 * 2) & 3;
    out.code_d[h] = static_cast<int8_t>((low | high << 4) - 32);
  }
  out.d[0] = half_bits(block + 108);
}

// Q4_K, Q5_K: reads scale and minimum of group g, 6 bits each, from the twelve bytes at byte 4.
void read_six(const uint8_t* block, int g, Block& out) {
  const uint8_t* packed = block + 4;
  int scale, least;
  if (g < 4) {
    scale = packed[g] & 63;
    least = packed[g + 4] & 63;
  } else {
    scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
    least = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
  }
  out.code_d[0] = static_cast<int8_t>(scale);
  out.code_m[0] = static_cast<int8_t>(least);
  out.d[0] = half_bits(block);
  out.m = negated(half_bits(block + 2));
}

void read_q4_k(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 144;
  const int part = Part(b).number;
  // A chunk of 32 bytes holds two parts; each half of a part becomes low or high nibbles.
  const uint8_t* chunk = block + 16 + part / 2 * 32;
  for (int j = 0; j < 4; ++j) {
    const uint32_t first = word(chunk + 4 * j), second = word(chunk + 16 + 4 * j);
    out.q[j] = part % 2 == 0 ? (first & kLowNibbles) | (second & kLowNibbles) << 4
                             : (first >> 4 & kLowNibbles) | (second & ~kLowNibbles);
  }
  read_six(block, part, out);
}

void read_q5_k(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 176;
  const int part = Part(b).number;
  for (int j = 0; j < 8; ++j) {
    const uint32_t low = word(block + 48 + part / 2 * 32 + 4 * j) >> part % 2 * 4 & kLowNibbles;
    out.q[j] = low | (word(block + 16 + 4 * j) >> part & 0x01010101) << 4;
  }
  read_six(block, part, out);
}

void read_q6_k(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 210;
  const Part part(b);
  for (int j = 0; j < 8; ++j) {
    const uint8_t* lows = block + 64 * part.pair + part.number % 2 * 32 + 4 * j;
    const uint32_t low = word(lows) >> (part.number % 4 < 2 ? 0 : 4) & kLowNibbles;
    const uint32_t high = word(block + 128 + 32 * part.pair + 4 * j) >> part.shift & 0x03030303;
    out.q[j] = low | high << 4;
  }
  for (int h = 0; h < 2; ++h) {
    out.code_d[h] = static_cast<int8_t>(block[192 + 2 * part.number + h]);
  }
  out.d[0] = half_bits(block + 208);
}

// Byte e is the exponent of the scale 2^(e - 127), halved because levels are doubled (kFp4Levels).
void read_mxfp4(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b * 17;
  const int e = block[0];
  // As bfloat16: the exponent is in bits 7 to 14; 2^-128 and 2^-127 are subnormal.
  out.d[0] = static_cast<uint16_t>(e > 1 ? (e - 1) << 7 : 0x20 << e);
  read_nibbles(block + 1, out);
}

// Returns half of an unsigned 8-bit float (4 exponent bits, 3 mantissa bits) as float16.
uint16_t half_of_ue4m3(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  if (code == 0x7F) return 0;
  if (exponent) return static_cast<uint16_t>((exponent + 7) << 10 | mantissa << 7);
  constexpr uint16_t kTiny[8] = {0, 0x1400, 0x1800, 0x1A00, 0x1C00, 0x1D00, 0x1E00, 0x1F00};
  return kTiny[mantissa];  // a multiple of 2^-10
}

// A block is four scales, then four runs of 16 values; a run's first eight are its low nibbles.
void read_nvfp4(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 2 * 36;
  const int first = static_cast<int>(b % 2 * 2);
  const uint8_t* runs = block + 4 + 8 * first;
  for (int h = 0; h < 2; ++h) out.d[h] = half_of_ue4m3(block[first + h]);
  for (int j = 0; j < 2; ++j) {  // words j and 2 + j: inputs 4j and 8 + 4j of both runs
    const uint32_t one = word(runs + 4 * j), other = word(runs + 8 + 4 * j);
    out.q[j] = (one & kLowNibbles) | (other & kLowNibbles) << 4;
    out.q[2 + j] = (one >> 4 & kLowNibbles) | (other & ~kLowNibbles);
  }
}

void read_iq4_xs(const uint8_t* row, int64_t b, Block& out) {
  const uint8_t* block = row + b / 8 * 136;
  const int part = Part(b).number;
  const int low = block[4 + part / 2] >> part % 2 * 4 & 15;
  const int high = half_bits(block + 2) >> 2 * part & 3;
  out.code_d[0] = static_cast<int8_t>((low | high << 4) - 32);
  out.d[0] = half_bits(block);
  read_nibbles(block + 8 + 16 * part, out);
}

constexpr StoredFormat kFormats[] = {
    {"F32", 1, 4, Layout::kF32, 0, Scales::kF16, false, nullptr},
    {"F16", 1, 2, Layout::kF16, 0, Scales::kF16, false, nullptr},
    {"BF16", 1, 2, Layout::kBf16, 0, Scales::kF16, false, nullptr},
    {"Q4_0", 32, 18, Layout::kU4, 32, Scales::kF16, false, read_q4_0},
    {"Q4_1", 32, 20, Layout::kU4, 32, Scales::kF16, true, read_q4_1},
    {"Q5_0", 32, 22, Layout::kU5, 32, Scales::kF16, false, read_q5_0},
    {"Q5_1", 32, 24, Layout::kU5, 32, Scales::kF16, true, read_q5_1},
    {"Q8_0", 32, 34, Layout::kU8, 32, Scales::kF16, false, read_q8_0},
    {"Q2_K", 256, 84, Layout::kU2, 16, Scales::kCodes, true, read_q2_k},
    {"Q3_K", 256, 110, Layout::kU3, 16, Scales::kCodes, false, read_q3_k},
    {"Q4_K", 256, 144, Layout::kU4, 32, Scales::kCodes, true, read_q4_k},
    {"Q5_K", 256, 176, Layout::kU5, 32, Scales::kCodes, true, read_q5_k},
    {"Q6_K", 256, 210, Layout::kU6, 16, Scales::kCodes, false, read_q6_k},
    {"MXFP4", 32, 17, Layout::kFp4, 32, Scales::kBf16, false, read_mxfp4},
    {"NVFP4", 64, 36, Layout::kFp4, 16, Scales::kF16, false, read_nvfp4},
    {"IQ4_NL", 32, 18, Layout::kIq4, 32, Scales::kF16, false, read_q4_0},
    {"IQ4_XS", 256, 136, Layout::kIq4, 32, Scales::kCodes, false, read_iq4_xs},
};

}  // namespace

std::vector<std::string> stored_formats() {
  std::vector<std::string> names;
  for (const StoredFormat& format : kFormats) names.emplace_back(format.name);
  return names;
}

const StoredFormat& stored_format(const std::string& name) {
  std::string known;
  for (const StoredFormat& format : kFormats) {
    if (name == format.name) return format;
    known += std::string(known.empty() ? "" : ", ") + format.name;
  }
  throw std::invalid_argument("no packed layout for format '" + name + "'; known: " + known);
}

}  // namespace pdserve
