// Packing of weights: reads only the given bytes; a row's values depend neither on other rows nor
// on the number of threads; grouped values are exact.
#include <stdexcept>
#include <string>
#include <vector>

#include "linear/pack.h"
#include "kernels.h"

namespace pdserve {
namespace {

std::vector<float> values_of(const Matrix& m) {
  std::vector<float> values(static_cast<size_t>(m.rows * m.cols));
  for (int64_t row = 0; row < m.rows; ++row) {
    generic_kernels().matrix_row(m, row, values.data() + row * m.cols);
  }
  return values;
}

void check_equal(const char* name, const float* got, const float* want, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    CHECK(same_bits(got[i], want[i]), "%s, value %d: %a, not %a", name, static_cast<int>(i), got[i],
          want[i]);
  }
}

template <class T>
Guarded<T> random_bytes(Random& random, int64_t count) {
  Guarded<T> made(count);
  for (int64_t i = 0; i < count; ++i) made[i] = static_cast<T>(random.bits());
  return made;
}

// Returns the error message; empty if there is no error.
template <class Make>
std::string refusal(const Make& make) {
  try {
    make();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void check_refused(const char* want, const std::string& got) {
  CHECK(got.find(want) != std::string::npos, "refused with '%s', not '%s'", got.c_str(), want);
}

void check_stored(Random& random, Pool& pool, const std::string& name, int64_t rows) {
  Pool alone(1);
  const StoredFormat& format = stored_format(name);
  const int64_t cols = format.block_values * (format.read ? 1 + random.below(3) : 33);
  const int64_t row_bytes = cols / format.block_values * format.block_bytes;
  const Guarded<uint8_t> bytes = random_bytes<uint8_t>(random, rows * row_bytes);
  const Matrix m = pack(pool, format, bytes.data(), bytes.size(), rows, cols);
  const std::vector<float> values = values_of(m);
  for (int64_t row = 0; row < rows; ++row) {
    Guarded<uint8_t> own(row_bytes);
    std::memcpy(own.data(), bytes.data() + row * row_bytes, static_cast<size_t>(row_bytes));
    const Matrix one = pack(alone, format, own.data(), row_bytes, 1, cols);
    check_equal(format.name, values.data() + row * cols, values_of(one).data(), cols);
  }
  check_refused("do not fit", refusal([&] {
                  pack(pool, format, bytes.data(), bytes.size() - 1, rows, cols);
                }));
}

// Random levels with scales that are multiples of 1 / 64, so that values are exact.
struct Groups {
  Grouped from{};
  Guarded<uint8_t> codes, d, zeros;
  std::vector<float> scales;

  Groups(Random& random, Layout layout, Scales type, int64_t rows, int64_t groups, int64_t size,
         bool has_zeros)
      : codes(random_bytes<uint8_t>(random, rows * groups * size / (layout == Layout::kU4 ? 2 : 1))),
        d(rows * groups * scale_bytes(type)),
        zeros(random_bytes<uint8_t>(random, rows * groups)) {
    for (int64_t i = 0; layout == Layout::kU4 && i < zeros.size(); ++i) zeros[i] &= 15;
    for (int64_t i = 0; i < rows * groups; ++i) {
      const int exponent = static_cast<int>(random.below(6)) - 3;
      scales.push_back(std::ldexp(1.0f, exponent));
      const uint32_t wide = static_cast<uint32_t>(exponent + 127) << 23;
      const uint16_t narrow = type == Scales::kF16 ? half_of(false, exponent, 0)
                                                   : static_cast<uint16_t>(wide >> 16);
      if (type == Scales::kF32) std::memcpy(d.data() + 4 * i, &wide, 4);
      else std::memcpy(d.data() + 2 * i, &narrow, 2);
    }
    from.layout = layout;
    from.rows = rows;
    from.cols = groups * size;
    from.groups = groups;
    from.codes = codes.data();
    from.scales = type;
    from.d = d.data();
    from.zeros = has_zeros ? zeros.data() : nullptr;
  }

  float value(int64_t row, int64_t col) const {
    const int64_t at = row * from.cols + col;
    const int64_t group = row * from.groups + col / (from.cols / from.groups);
    const bool four = from.layout == Layout::kU4;
    const int level = four ? codes[at / 2] >> at % 2 * 4 & 15 : codes[at];
    const int zero = from.zeros ? zeros[group] : four ? 8 : 128;
    return static_cast<float>(level - zero) * scales[static_cast<size_t>(group)];
  }
};

void check_groups(Random& random, Pool& pool, Layout layout, Scales type, int64_t size,
                  bool has_zeros) {
  const int64_t rows = 1 + random.below(40), groups = 2 * (1 + random.below(3));
  Groups made(random, layout, type, rows, groups, size, has_zeros);
  const std::vector<float> values = values_of(pack_groups(pool, made.from));
  std::vector<float> want;
  for (int64_t i = 0; i < rows * made.from.cols; ++i) {
    want.push_back(made.value(i / made.from.cols, i % made.from.cols));
  }
  check_equal("groups", values.data(), want.data(), static_cast<int64_t>(want.size()));
  // The last scale becomes infinite.
  std::memset(made.d.data() + made.d.size() - 2, 0, 2);
  made.d[made.d.size() - 1] = type == Scales::kF16 ? 0x7C : 0x7F;
  if (type != Scales::kF16) made.d[made.d.size() - 2] = 0x80;
  if (type == Scales::kF32) std::memset(made.d.data() + made.d.size() - 4, 0, 2);
  check_refused("a scale is infinite or NaN", refusal([&] { pack_groups(pool, made.from); }));
}

// 8-bit floats with any group, and 4-bit floats: kernels read only within their memory.
void check_floats(Random& random, Pool& pool) {
  Groups eight(random, Layout::kF8, Scales::kF32, 21, 2, 5, false);
  for (int64_t i = 0; i < eight.codes.size(); ++i) eight.codes[i] = 0x38;  // 1
  const std::vector<float> values = values_of(pack_groups(pool, eight.from));
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK(values[i] == eight.scales[i / 5], "an 8-bit float of 1 times its scale is %g", values[i]);
  }
  eight.codes[eight.codes.size() - 1] = 0xFF;
  check_refused("NaN", refusal([&] { pack_groups(pool, eight.from); }));

  Groups four(random, Layout::kFp4, Scales::kF32, 21, 4, 16, false);
  Guarded<uint8_t> codes(21 * 32), scales(21 * 4);
  Guarded<float> divisors(21);
  for (int64_t i = 0; i < codes.size(); ++i) codes[i] = 0x22;  // 1 and 1
  for (int64_t i = 0; i < scales.size(); ++i) scales[i] = 0x38;
  for (int64_t i = 0; i < divisors.size(); ++i) divisors[i] = std::ldexp(1.0f, static_cast<int>(i));
  four.from.codes = codes.data();
  four.from.scales = Scales::kE4m3;
  four.from.d = scales.data();
  four.from.divisors = divisors.data();
  const std::vector<float> small = values_of(pack_groups(pool, four.from));
  for (size_t i = 0; i < small.size(); ++i) {
    CHECK(small[i] == 1 / divisors[static_cast<int64_t>(i) / 64], "a 4-bit float is %g", small[i]);
  }
  divisors[20] = 0;
  check_refused("a divisor", refusal([&] { pack_groups(pool, four.from); }));
}

}  // namespace

void test_pack() {
  Random random(11);
  Pool pool(3, {}, 5);
  int64_t number = 0;
  for (const std::string& name : stored_formats()) {
    for (int64_t rows : {1, 16, 37}) {
      if (runs(number++)) check_stored(random, pool, name, rows);
    }
  }
  for (Scales type : {Scales::kF16, Scales::kBf16, Scales::kF32}) {
    for (bool zeros : {false, true}) {
      check_groups(random, pool, Layout::kU4, type, 32, zeros);
      check_groups(random, pool, Layout::kU8, type, 96, zeros);
    }
    check_groups(random, pool, Layout::kU8, type, 16, false);
  }
  check_floats(random, pool);
}

}  // namespace pdserve
