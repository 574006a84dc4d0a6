#include "linear/pack.h"

#include <algorithm>
#include <stdexcept>

#include "base/arena.h"

namespace pdserve {

namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // rows or columns; keeps products within int64

constexpr StoredFormat kFormats[] = {
    {"F32", 1, 4, Layout::kF32, 1, false, false},
    {"F16", 1, 2, Layout::kF16, 1, false, false},
    {"BF16", 1, 2, Layout::kBf16, 1, false, false},
    {"Q4_0", 32, 18, Layout::kU4, 32, false, false},
    {"Q4_1", 32, 20, Layout::kU4, 32, false, true},
    {"Q5_0", 32, 22, Layout::kU5, 32, false, false},
    {"Q5_1", 32, 24, Layout::kU5, 32, false, true},
    {"Q8_0", 32, 34, Layout::kU8, 32, false, false},
    {"Q2_K", 256, 84, Layout::kU8, 16, true, true},
    {"Q3_K", 256, 110, Layout::kU8, 16, true, false},
    {"Q4_K", 256, 144, Layout::kU4, 32, true, true},
    {"Q5_K", 256, 176, Layout::kU5, 32, true, true},
    {"Q6_K", 256, 210, Layout::kU8, 16, true, false},
};

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

// A float16 as float, exactly; by arithmetic, because not every compiler has the type.
float half(const uint8_t* p) {
  const uint32_t bits = half_bits(p);
  const uint32_t sign = (bits & 0x8000) << 16, rest = (bits & 0x7FFF) << 13;
  uint32_t wide = rest + (112u << 23);                  // from bias 15 to bias 127
  if ((bits & 0x7C00) == 0x7C00) wide += 112u << 23;    // infinity and NaN
  float value;
  if ((bits & 0x7C00) == 0) {  // 0 and what is below the normal numbers: a multiple of 2^-24
    value = static_cast<float>(bits & 0x3FF) * 0x1p-24f;
    std::memcpy(&wide, &value, 4);
  }
  wide |= sign;
  std::memcpy(&value, &wide, 4);
  return value;
}

// One block of 32 values of one row as words of 4 bytes (8 words, or 4 whose low nibbles are the
// first 16 values), with its scales and minima: two where groups are of 16 values.
struct Block {
  uint32_t q[8];
  float d[2];
  float m[2];
  uint16_t half_d;
  uint16_t half_m;
};

constexpr uint32_t kLow = 0x0F0F0F0F, kSigns = 0x80808080;

// Byte k of the result is `set` where bit `at` + k of mask is 1.
uint32_t spread(uint32_t mask, int at, uint32_t set) {
  const uint32_t nibble = mask >> at & 15;
  return (nibble & 1) * set | (nibble & 2) * (set << 7) | (nibble & 4) * (set << 14) |
         (nibble & 8) * (set << 21);
}

// Values centred on zero, from q of up to 7 bits and a centre, as q + 128 - centre.
uint32_t biased(uint32_t q, uint32_t centre) { return q + (0x80 - centre) * 0x01010101u; }

void read_q4(const uint8_t* block, int at, Block& out) {
  for (int j = 0; j < 4; ++j) out.q[j] = word(block + at + 4 * j);
}

// Q5_0, Q5_1: nibbles at `at`, the fifth bits at `at` - 4.
void read_q5(const uint8_t* block, int at, Block& out) {
  const uint32_t fifth = word(block + at - 4);
  for (int j = 0; j < 4; ++j) {
    const uint32_t both = word(block + at + 4 * j);
    out.q[j] = (both & kLow) | spread(fifth, 4 * j, 16);
    out.q[j + 4] = (both >> 4 & kLow) | spread(fifth, 16 + 4 * j, 16);
  }
}

// Q4_K, Q5_K: scale and minimum of group g, 6 bits each, in the twelve bytes at `packed`.
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
  out.d[0] = static_cast<float>(scale) * half(block);
  out.m[0] = -(static_cast<float>(least) * half(block + 2));
}

// Block b (of 32 values) of a row that starts at `row`.
void read_block(const StoredFormat& format, const uint8_t* row, int64_t b, Block& out) {
  const int64_t parts = format.block_values / 32;
  const uint8_t* block = row + b / parts * format.block_bytes;
  const int part = static_cast<int>(b % parts);
  const int pair = part / 4, shift = part % 4 * 2;  // of the K formats with 2-bit fields
  out.half_d = half_bits(block);
  out.half_m = half_bits(block + 2);
  switch (format.name[1] * 2 + (format.name[3] == 'K')) {
    case '4' * 2:
      read_q4(block, format.has_minima ? 4 : 2, out);
      break;
    case '5' * 2:
      read_q5(block, format.has_minima ? 8 : 6, out);
      break;
    case '8' * 2:
      for (int j = 0; j < 8; ++j) out.q[j] = word(block + 2 + 4 * j) ^ kSigns;
      break;
    case '2' * 2 + 1:
      for (int j = 0; j < 8; ++j) {
        out.q[j] = word(block + 16 + 32 * pair + 4 * j) >> shift & 0x03030303;
      }
      for (int h = 0; h < 2; ++h) {
        const uint8_t scales = block[2 * part + h];
        out.d[h] = static_cast<float>(scales & 15) * half(block + 80);
        out.m[h] = -(static_cast<float>(scales >> 4) * half(block + 82));
      }
      break;
    case '3' * 2 + 1:
      for (int j = 0; j < 8; ++j) {
        const uint32_t low = word(block + 32 + 32 * pair + 4 * j) >> shift & 0x03030303;
        const uint32_t top = word(block + 4 * j) >> part & 0x01010101;
        out.q[j] = biased(low | top << 2, 4);
      }
      for (int h = 0; h < 2; ++h) {
        const int g = 2 * part + h;
        const int low = block[96 + g % 8] >> (g < 8 ? 0 : 4) & 15;
        const int high = block[104 + g % 4] >> (g / 4 * 2) & 3;
        out.d[h] = static_cast<float>((low | high << 4) - 32) * half(block + 108);
      }
      break;
    case '4' * 2 + 1: {
      // A chunk of 32 bytes holds two blocks; each half of a block becomes low or high nibbles.
      const uint8_t* chunk = block + 16 + part / 2 * 32;
      for (int j = 0; j < 4; ++j) {
        const uint32_t first = word(chunk + 4 * j), second = word(chunk + 16 + 4 * j);
        out.q[j] = part % 2 == 0 ? (first & kLow) | (second & kLow) << 4
                                 : (first >> 4 & kLow) | (second & ~kLow);
      }
      read_six(block, part, out);
      break;
    }
    case '5' * 2 + 1:
      for (int j = 0; j < 8; ++j) {
        const uint32_t low = word(block + 48 + part / 2 * 32 + 4 * j) >> part % 2 * 4 & kLow;
        out.q[j] = low | (word(block + 16 + 4 * j) >> part & 0x01010101) << 4;
      }
      read_six(block, part, out);
      break;
    default:  // Q6_K
      for (int j = 0; j < 8; ++j) {
        const uint8_t* lows = block + 64 * pair + part % 2 * 32 + 4 * j;
        const uint32_t low = word(lows) >> (part % 4 < 2 ? 0 : 4) & kLow;
        const uint32_t high = word(block + 128 + 32 * pair + 4 * j) >> shift & 0x03030303;
        out.q[j] = biased(low | high << 4, 32);
      }
      for (int h = 0; h < 2; ++h) {
        const auto scale = static_cast<int8_t>(block[192 + 2 * part + h]);
        out.d[h] = static_cast<float>(scale) * half(block + 208);
      }
  }
}

// Eight words of 0 to 31 a byte as kU5 has them, of one row: four of nibbles and one of fifth bits.
void split_fifths(uint32_t (&q)[8]) {
  uint32_t fifths = 0;
  for (int k = 0; k < 8; ++k) fifths |= (q[k] >> 4 & 0x01010101u) << k;
  for (int j = 0; j < 4; ++j) q[j] = (q[j] & kLow) | (q[j + 4] & kLow) << 4;
  q[4] = fifths;
}

// 16 rows of one block format; rows[i] is null where a row is padding, and the tile is zeros.
void pack_blocks(const StoredFormat& format, const Matrix& m, const uint8_t* const* rows,
                 uint8_t* tile) {
  const int words = quant_bits(m.layout), groups = 32 / m.group;
  auto* q = reinterpret_cast<uint32_t*>(tile);
  uint8_t *d = tile + m.scales_at, *least = tile + m.minima_at;
  Block block;
  for (int64_t b = 0; b < m.cols / 32; ++b) {
    for (int64_t i = 0; i < kLanes && rows[i]; ++i) {
      read_block(format, rows[i], b, block);
      if (m.layout == Layout::kU5) split_fifths(block.q);
      for (int j = 0; j < words; ++j) q[(b * words + j) * kLanes + i] = block.q[j];
      for (int h = 0; h < groups; ++h) {
        const int64_t at = (b * groups + h) * kLanes + i;
        if (m.wide_scales) {
          reinterpret_cast<float*>(d)[at] = block.d[h];
          if (m.has_minima) reinterpret_cast<float*>(least)[at] = block.m[h];
        } else {
          reinterpret_cast<uint16_t*>(d)[at] = block.half_d;
          if (m.has_minima) reinterpret_cast<uint16_t*>(least)[at] = block.half_m;
        }
      }
    }
  }
}

// 16 rows of plain numbers: values of T side by side, `cols` of them a row.
template <class T>
void pack_numbers(int64_t cols, const uint8_t* const* rows, uint8_t* tile) {
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t i = 0; i < kLanes && rows[i]; ++i) {
      std::memcpy(tile + (c * kLanes + i) * sizeof(T), rows[i] + c * sizeof(T), sizeof(T));
    }
  }
}

void pack_tile(const StoredFormat& format, const Matrix& m, const uint8_t* const* rows,
               uint8_t* tile) {
  switch (m.layout) {
    case Layout::kU4:
    case Layout::kU5:
    case Layout::kU8:
      return pack_blocks(format, m, rows, tile);
    case Layout::kF32:
      return pack_numbers<uint32_t>(m.cols, rows, tile);
    case Layout::kF16:
      return pack_numbers<uint16_t>(m.cols, rows, tile);
    case Layout::kBf16:
      break;
  }
  pack_numbers<uint32_t>(m.cols / 2, rows, tile);  // pairs
  for (int64_t i = 0; m.cols % 2 && i < kLanes && rows[i]; ++i) {
    std::memcpy(tile + (m.cols / 2 * kLanes + i) * 4, rows[i] + (m.cols - 1) * 2, 2);
  }
}

// A matrix without memory yet for `rows` times `cols` values: says what lies where in a tile.
Matrix lay_out(const StoredFormat& format, int64_t rows, int64_t cols) {
  Matrix m;
  m.layout = format.layout;
  m.rows = rows;
  m.cols = cols;
  m.group = format.group;
  m.wide_scales = format.wide_scales;
  m.has_minima = format.has_minima;
  int64_t quants = 0, scales = 0;
  switch (format.layout) {
    case Layout::kU4:
    case Layout::kU5:
    case Layout::kU8:
      m.offset = format.has_minima ? 0 : 1 << (quant_bits(format.layout) - 1);
      quants = cols * kLanes * quant_bits(format.layout) / 8;
      scales = cols / format.group * kLanes * (format.wide_scales ? 4 : 2);
      break;
    case Layout::kBf16:
      quants = round_up(cols, 2) * kLanes * 2;
      break;
    case Layout::kF16:
      quants = cols * kLanes * 2;
      break;
    case Layout::kF32:
      quants = cols * kLanes * 4;
  }
  m.scales_at = quants;
  m.minima_at = quants + scales;
  m.tile_bytes = round_up(quants + (format.has_minima ? 2 : 1) * scales, kAlign);
  return m;
}

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

Matrix pack(Pool& pool, const StoredFormat& format, const uint8_t* bytes, int64_t num_bytes,
            int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
    throw std::invalid_argument("a matrix needs at least one row and one column");
  }
  if (cols % format.block_values != 0) {
    throw std::invalid_argument(std::string(format.name) + " rows are multiples of " +
                                std::to_string(format.block_values) + " values, not " +
                                std::to_string(cols));
  }
  const int64_t row_bytes = cols / format.block_values * format.block_bytes;
  if (num_bytes % row_bytes != 0 || num_bytes / row_bytes != rows) {
    throw std::invalid_argument(std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
                                " bytes do not fit data of " + std::to_string(num_bytes));
  }
  Matrix m = lay_out(format, rows, cols);
  m.data = weight_memory(m.bytes());
  uint8_t* data = m.data.get();
  pool.run(m.tiles(), [&](int64_t t, int) {
    const uint8_t* from[kLanes] = {};
    const int64_t count = std::min(kLanes, rows - t * kLanes);
    for (int64_t i = 0; i < count; ++i) from[i] = bytes + (t * kLanes + i) * row_bytes;
    pack_tile(format, m, from, data + t * m.tile_bytes);  // padding stays 0
  });
  return m;
}

}  // namespace pdserve
