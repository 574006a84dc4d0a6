#include "linear/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/arena.h"
#include "base/half.h"

namespace pdserve {

namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // rows or columns; keeps products within int64

// Combines bits `at` and `at` + 1 of each byte of four words into one word.
uint32_t fields(const uint32_t* q, int at) {
  uint32_t all = 0;
  for (int k = 0; k < 4; ++k) all |= (q[k] >> at & 0x03030303u) << 2 * k;
  return all;
}

// Combines bit `at` of each byte of eight words into one word.
uint32_t flags(const uint32_t* q, int at) {
  uint32_t all = 0;
  for (int k = 0; k < 8; ++k) all |= (q[k] >> at & 0x01010101u) << k;
  return all;
}

// Converts eight words of one-byte levels to the words of a layout with bit planes.
void split(Layout layout, uint32_t (&q)[8]) {
  if (layout == Layout::kU2 || layout == Layout::kU3) {
    const uint32_t low = fields(q, 0), high = fields(q + 4, 0), thirds = flags(q, 2);
    q[0] = low;
    q[1] = high;
    q[2] = thirds;
  } else if (layout == Layout::kU5 || layout == Layout::kU6) {
    const bool fives = layout == Layout::kU5;
    const uint32_t first = fives ? flags(q, 4) : fields(q, 4), second = fields(q + 4, 4);
    for (int j = 0; j < 4; ++j) q[j] = (q[j] & kLowNibbles) | (q[j + 4] & kLowNibbles) << 4;
    q[4] = first;
    q[5] = second;
  }
}

void put_half(uint8_t* at, int64_t index, uint16_t half) { std::memcpy(at + 2 * index, &half, 2); }

// Packs 16 rows of a block format; rows[i] is null for padding; the tile must be zeros.
void pack_blocks(const StoredFormat& format, const Matrix& m, const uint8_t* const* rows,
                 uint8_t* tile) {
  const int words = quant_bits(m.layout), groups = static_cast<int>(32 / m.group);
  const bool minima = m.addend == Addend::kMinima, codes = m.scales == Scales::kCodes;
  auto* q = reinterpret_cast<uint32_t*>(tile);
  uint8_t *d = tile + m.scales_at, *addend = tile + m.minima_at, *factors = tile + m.factors_at;
  Block block{};
  for (int64_t b = 0; b < m.cols / 32; ++b) {
    for (int64_t i = 0; i < kLanes && rows[i]; ++i) {
      format.read(rows[i], b, block);
      split(m.layout, block.q);
      for (int j = 0; j < words; ++j) q[(b * words + j) * kLanes + i] = block.q[j];
      for (int h = 0; h < groups; ++h) {
        const int64_t at = (b * groups + h) * kLanes + i;
        if (codes) {
          d[at] = static_cast<uint8_t>(block.code_d[h]);
          if (minima) addend[at] = static_cast<uint8_t>(block.code_m[h]);
        } else {
          put_half(d, at, block.d[h]);
          if (minima) put_half(addend, at, block.m);
        }
      }
      if (codes) {
        const int64_t at = b * 32 / kSuper * kLanes + i;
        put_half(factors, at, block.d[0]);
        if (minima) put_half(factors, m.cols / kSuper * kLanes + at, block.m);
      }
    }
  }
}

// Packs 16 rows of plain numbers, `cols` values of type T per row.
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
  if (format.read) return pack_blocks(format, m, rows, tile);
  if (m.layout == Layout::kF32) return pack_numbers<uint32_t>(m.cols, rows, tile);
  if (m.layout == Layout::kF16) return pack_numbers<uint16_t>(m.cols, rows, tile);
  pack_numbers<uint32_t>(m.cols / 2, rows, tile);  // pairs of BF16
  for (int64_t i = 0; m.cols % 2 && i < kLanes && rows[i]; ++i) {
    std::memcpy(tile + (m.cols / 2 * kLanes + i) * 4, rows[i] + (m.cols - 1) * 2, 2);
  }
}

// Reads a block of 32 codes of one row as words of kU4 or kU8.
void read_codes(const Grouped& from, const uint8_t* codes, uint32_t* q) {
  if (from.layout == Layout::kU8) {
    std::memcpy(q, codes, 32);
    return;
  }
  uint8_t both[16];  // pairs inputs n and 16 + n, not n and n + 1
  for (int n = 0; n < 16; n += 2) {
    const uint8_t low = codes[n / 2], high = codes[8 + n / 2];
    both[n] = static_cast<uint8_t>((low & 15) | high << 4);
    both[n + 1] = static_cast<uint8_t>(low >> 4 | (high & 0xF0));
  }
  std::memcpy(q, both, 16);
}

float wide(Scales scales, const uint8_t* d) {
  if (scales == Scales::kF32) {
    float value;
    std::memcpy(&value, d, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, d, 2);
  return scales == Scales::kF16 ? float_of_half(bits) : float_of_bf16(bits);
}

// Returns whether `holds` is true for every row; rows are divided over the threads.
template <class Holds>
bool all_rows(Pool& pool, int64_t rows, const Holds& holds) {
  std::atomic<bool> all{true};
  pool.run(ceil_div(rows, kLanes), [&](int64_t piece, int) {
    const int64_t end = std::min(rows, (piece + 1) * kLanes);
    for (int64_t row = piece * kLanes; row < end && all; ++row) {
      if (!holds(row)) all = false;
    }
  });
  return all;
}

// Returns whether `holds` is true for every scale.
template <class Holds>
bool all_scales(Pool& pool, const Grouped& from, const Holds& holds) {
  return all_rows(pool, from.rows, [&](int64_t row) {
    const int64_t size = scale_bytes(from.scales);
    const uint8_t* own = from.d + row * from.groups * size;
    for (int64_t g = 0; g < from.groups; ++g) {
      if (!holds(wide(from.scales, own + g * size))) return false;
    }
    return true;
  });
}

bool all_exact_halves(Pool& pool, const Grouped& from) {
  return all_scales(pool, from, [](float d) {
    uint16_t half;
    return exact_half(d, half);
  });
}

// Writes a finite value as a float, or as the float16 that equals it.
void put(Scales type, uint8_t* at, float value) {
  if (type == Scales::kF32) {
    std::memcpy(at, &value, 4);
  } else {
    uint16_t half;
    exact_half(value, half);
    std::memcpy(at, &half, 2);
  }
}

void pack_scales(const Grouped& from, const Matrix& m, int64_t row, int64_t lane, uint8_t* tile) {
  const int64_t size = scale_bytes(m.scales);
  if (m.scales == Scales::kE4m3) {
    // load_e4m3 returns 1/256 of the value, and kFp4Levels are doubled.
    put(Scales::kF32, tile + m.factors_at + lane * 4, from.divisors[row] / 128);
    for (int64_t g = 0; g < from.groups; ++g) {
      tile[m.scales_at + g * kLanes + lane] = from.d[row * from.groups + g];
    }
    return;
  }
  for (int64_t g = 0; g < from.groups; ++g) {
    const int64_t source = row * from.groups + g, at = g * kLanes + lane;
    const float d = wide(from.scales, from.d + source * scale_bytes(from.scales));
    put(m.scales, tile + m.scales_at + at * size, d);
    if (!from.zeros) continue;
    put(Scales::kF16, tile + m.minima_at + at * 2, -static_cast<float>(from.zeros[source]));
  }
}

void pack_grouped_tile(const Grouped& from, const Matrix& m, int64_t begin, uint8_t* tile) {
  const int64_t count = std::min(kLanes, from.rows - begin), bits = quant_bits(m.layout);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* codes = from.codes + (begin + i) * from.cols * (bits ? bits : 8) / 8;
    pack_scales(from, m, begin + i, i, tile);
    if (!bits) {
      for (int64_t c = 0; c < m.cols; ++c) tile[c * kLanes + i] = codes[c];
      continue;
    }
    uint32_t q[8];
    for (int64_t b = 0; b < m.cols / 32; ++b) {
      read_codes(from, codes + b * 4 * bits, q);
      for (int64_t j = 0; j < bits; ++j) {
        std::memcpy(tile + ((b * bits + j) * kLanes + i) * 4, q + j, 4);
      }
    }
  }
}

int64_t quant_bytes(Layout layout, int64_t cols) {
  switch (layout) {
    case Layout::kF32: return cols * kLanes * 4;
    case Layout::kF16: return cols * kLanes * 2;
    case Layout::kBf16: return round_up(cols, 2) * kLanes * 2;
    case Layout::kF8: return cols * kLanes;
    case Layout::kU4:
    case Layout::kU5:
    case Layout::kU8:
    case Layout::kU2:
    case Layout::kU3:
    case Layout::kU6:
    case Layout::kFp4:
    case Layout::kIq4: break;
  }
  return cols * kLanes * quant_bits(layout) / 8;
}

// Sets the offsets within a tile of `m`, whose layout, sizes, group, scales and addend are set, and
// allocates its memory.
void lay_out(Matrix& m) {
  const bool numbers = m.group == 0;
  m.offset = m.addend == Addend::kNone ? offset_of(m.layout) : 0;
  const int64_t groups = numbers ? 0 : m.cols / m.group * kLanes;
  const int size = m.addend == Addend::kNone    ? 0
                   : m.addend == Addend::kZeros ? 2
                                                : scale_bytes(m.scales);
  m.scales_at = quant_bytes(m.layout, m.cols);
  m.minima_at = m.scales_at + groups * scale_bytes(m.scales);
  m.factors_at = m.minima_at + groups * size;
  int64_t factors = 0;
  if (m.scales == Scales::kCodes) {
    factors = m.cols / kSuper * kLanes * 2 * (m.addend == Addend::kMinima ? 2 : 1);
  } else if (m.scales == Scales::kE4m3) {
    factors = kLanes * 4;
  }
  m.tile_bytes = round_up(m.factors_at + factors, kAlign);
  m.data = weight_memory(m.bytes());
}

void require_no_nan(Pool& pool, const uint8_t* e4m3, int64_t rows, int64_t cols) {
  const bool none = all_rows(pool, rows, [&](int64_t row) {
    bool found = false;  // no early exit, so that the compiler vectorizes the loop
    for (int64_t c = 0; c < cols; ++c) found |= (e4m3[row * cols + c] & 0x7F) == 0x7F;
    return !found;
  });
  if (!none) throw std::invalid_argument("an 8-bit float is NaN");
}

// Kernels multiply 8-bit floats by 256 times their scale, which is finite below this limit.
constexpr float kScaleLimit8 = 0x1p119f;

void require_scales(Pool& pool, const Grouped& from) {
  if (!all_scales(pool, from, [](float d) { return std::isfinite(d); })) {
    throw std::invalid_argument("a scale is infinite or NaN");
  }
  const auto small = [](float d) { return std::fabs(d) < kScaleLimit8; };
  if (from.layout == Layout::kF8 && !all_scales(pool, from, small)) {
    throw std::invalid_argument("a scale of 8-bit floats is 2^119 or more");
  }
}

// Ensures that no weight of a row, at most 6 * 448 / divisor, is infinite.
constexpr float kLeastDivisor = 0x1p-116f;

void require_divisors(const Grouped& from) {
  for (int64_t row = 0; row < from.rows; ++row) {
    if (!std::isfinite(from.divisors[row]) || from.divisors[row] < kLeastDivisor) {
      throw std::invalid_argument("a divisor is not finite or below 2^-116");
    }
  }
}

void require_sizes(int64_t rows, int64_t cols) {
  if (rows < 1 || cols < 1 || rows > kMost || cols > kMost) {
    throw std::invalid_argument("a matrix needs at least one row and one column");
  }
}

}  // namespace

Matrix pack(Pool& pool, const StoredFormat& format, const uint8_t* bytes, int64_t num_bytes,
            int64_t rows, int64_t cols) {
  require_sizes(rows, cols);
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
  Matrix m;
  m.layout = format.layout;
  m.rows = rows;
  m.cols = cols;
  m.group = format.group;
  m.scales = format.scales;
  m.addend = format.has_minima ? Addend::kMinima : Addend::kNone;
  lay_out(m);
  uint8_t* data = m.data.get();
  pool.run(m.tiles(), [&](int64_t t, int) {
    const uint8_t* from[kLanes] = {};
    const int64_t count = std::min(kLanes, rows - t * kLanes);
    for (int64_t i = 0; i < count; ++i) from[i] = bytes + (t * kLanes + i) * row_bytes;
    pack_tile(format, m, from, data + t * m.tile_bytes);  // padding stays 0
  });
  return m;
}

Matrix pack_groups(Pool& pool, const Grouped& from) {
  require_sizes(from.rows, from.cols);
  const int64_t group = from.groups > 0 ? from.cols / from.groups : 0;
  if (group < 1 || group * from.groups != from.cols) {
    throw std::invalid_argument("groups must divide the columns evenly");
  }
  if (from.scales != Scales::kE4m3) require_scales(pool, from);
  Matrix m;
  m.layout = from.layout;
  m.rows = from.rows;
  m.cols = from.cols;
  m.group = group;
  m.scales = Scales::kF32;
  if (from.layout == Layout::kF8) {
    require_no_nan(pool, from.codes, from.rows, from.cols);
  } else if (from.layout == Layout::kFp4) {
    if (group != 16 || from.cols % kBlock) {
      throw std::invalid_argument("groups of 4-bit floats are of 16 columns, an even number of them");
    }
    require_no_nan(pool, from.d, from.rows, from.groups);
    require_divisors(from);
    m.scales = Scales::kE4m3;
  } else if (from.layout == Layout::kU8 && group == 16) {
    if (from.zeros || from.cols % kBlock) {
      throw std::invalid_argument("groups of 16 integers are an even number, without zeros");
    }
  } else {
    if (group % kBlock) throw std::invalid_argument("groups of integers are multiples of 32 columns");
    if (from.cols / kBlock >= (int64_t{1} << 32) / (group / kBlock)) {  // group_of would be wrong
      throw std::invalid_argument("a row of groups is too long");
    }
    const bool halves = from.scales == Scales::kF16 ||
                        (from.scales == Scales::kBf16 && all_exact_halves(pool, from));
    m.scales = halves ? Scales::kF16 : Scales::kF32;
    if (from.zeros) m.addend = Addend::kZeros;
    m.group_step = group_step(group / kBlock);
  }
  lay_out(m);
  uint8_t* data = m.data.get();
  pool.run(m.tiles(), [&](int64_t t, int) {
    pack_grouped_tile(from, m, t * kLanes, data + t * m.tile_bytes);
  });
  return m;
}

}  // namespace pdserve
