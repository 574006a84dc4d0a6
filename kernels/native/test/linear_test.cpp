// Linear products of every layout: equal bits on every target, for a row alone and among others,
// and for any range of tiles; close to the sum in double of the weights' and activations' values.
#include <memory>
#include <vector>

#include "linear/linear.h"
#include "kernels.h"

namespace pdserve {
namespace {

struct Shape {
  Layout layout;
  int group;  // 0: the whole row
  Scales scales;
  Addend addend;
};

constexpr Scales kHalf = Scales::kF16, kBrain = Scales::kBf16, kWide = Scales::kF32;
constexpr Scales kCodes = Scales::kCodes, kE4m3 = Scales::kE4m3;
constexpr Addend kNone = Addend::kNone, kMinima = Addend::kMinima, kZeros = Addend::kZeros;

const Shape kShapes[] = {
    {Layout::kU4, 32, kHalf, kNone},    {Layout::kU4, 32, kHalf, kMinima},
    {Layout::kU4, 32, kCodes, kMinima}, {Layout::kU4, 128, kHalf, kZeros},
    {Layout::kU4, 0, kWide, kNone},     {Layout::kU4, 96, kWide, kZeros},
    {Layout::kU5, 32, kHalf, kNone},    {Layout::kU5, 32, kHalf, kMinima},
    {Layout::kU5, 32, kCodes, kMinima}, {Layout::kU8, 32, kHalf, kNone},
    {Layout::kU8, 0, kWide, kNone},     {Layout::kU8, 64, kHalf, kZeros},
    {Layout::kU8, 128, kWide, kZeros},  {Layout::kU8, 16, kWide, kNone},
    {Layout::kU2, 16, kCodes, kMinima},
    {Layout::kU3, 16, kCodes, kNone},   {Layout::kU6, 16, kCodes, kNone},
    {Layout::kFp4, 32, kBrain, kNone},  {Layout::kFp4, 16, kHalf, kNone},
    {Layout::kFp4, 16, kE4m3, kNone},   {Layout::kIq4, 32, kHalf, kNone},
    {Layout::kIq4, 32, kCodes, kNone},  {Layout::kF8, 128, kWide, kNone},
    {Layout::kF8, 0, kWide, kNone},     {Layout::kBf16, 32, kHalf, kNone},
    {Layout::kF16, 32, kHalf, kNone},   {Layout::kF32, 32, kHalf, kNone},
};

bool quantized(const Matrix& m) { return quant_bits(m.layout) > 0; }

void set_float(uint8_t* at, float value) { std::memcpy(at, &value, 4); }
void set_half(uint8_t* at, uint16_t value) { std::memcpy(at, &value, 2); }

bool scaled(const Matrix& m) { return quantized(m) || m.layout == Layout::kF8; }

int bits_of(Layout layout) {
  if (int bits = quant_bits(layout)) return bits;
  return layout == Layout::kF8 ? 8 : layout == Layout::kF32 ? 32 : 16;
}

void set_number(Random& random, Scales type, uint8_t* at) {
  if (type == Scales::kCodes || type == Scales::kE4m3) {
    *at = static_cast<uint8_t>(random.below(64) | random.below(2) << 7);
    return;
  }
  if (type == Scales::kF32) return set_float(at, random.uniform() / 16);
  if (type == Scales::kF16) return set_half(at, any_half(random, -5));
  const float value = random.uniform() / 16;
  uint32_t word;
  std::memcpy(&word, &value, 4);
  set_half(at, static_cast<uint16_t>(word >> 16));
}

// Random bytes as quants, moderate scales; the matrix ends at an inaccessible page.
Matrix random_matrix(Random& random, const Shape& shape, int64_t rows, int64_t cols) {
  Matrix m;
  m.layout = shape.layout;
  m.rows = rows;
  m.cols = cols;
  m.group = shape.group ? shape.group : cols;
  m.group_step = group_step(m.group < 32 ? 1 : m.group / 32);
  m.scales = shape.scales;
  m.addend = shape.addend;
  m.offset = shape.addend == Addend::kNone ? offset_of(shape.layout) : 0;
  const int64_t inputs = shape.layout == Layout::kBf16 ? round_up(cols, 2) : cols;
  const int bits = bits_of(shape.layout);
  const int64_t quants = inputs * kLanes * bits / 8;
  const int64_t numbers = scaled(m) ? cols / m.group * kLanes : 0;
  const Scales addend = shape.addend == Addend::kZeros ? Scales::kF16 : shape.scales;
  m.scales_at = quants;
  m.minima_at = quants + numbers * scale_bytes(shape.scales);
  const int64_t addends = shape.addend == Addend::kNone ? 0 : numbers * scale_bytes(addend);
  m.factors_at = m.minima_at + addends;
  const bool codes = shape.scales == Scales::kCodes, floats = shape.scales == Scales::kE4m3;
  const int64_t supers = codes ? cols / kSuper * kLanes * (addends ? 2 : 1) : 0;
  m.tile_bytes = round_up(m.factors_at + 2 * supers + (floats ? 4 * kLanes : 0), kAlign);
  auto memory = std::make_shared<Guarded<uint8_t>>(m.bytes());
  m.data = std::shared_ptr<uint8_t>(memory, memory->data());
  for (int64_t tile = 0; tile < m.tiles(); ++tile) {
    uint8_t* at = m.data.get() + tile * m.tile_bytes;
    for (int64_t i = 0; i < quants * 8 / bits; ++i) {
      if (m.layout == Layout::kF8) {
        at[i] = static_cast<uint8_t>(random.bits() & 0xBF);  // tame: exponents below 8
      } else if (quantized(m)) {
        if (i < quants) at[i] = static_cast<uint8_t>(random.bits());
      } else if (m.layout == Layout::kF32) {
        set_float(at + 4 * i, random.uniform());
      } else if (m.layout == Layout::kF16) {
        set_half(at + 2 * i, any_half(random, 0));
      } else {
        float value = random.uniform();
        uint32_t word;
        std::memcpy(&word, &value, 4);
        set_half(at + 2 * i, static_cast<uint16_t>(word >> 16));
      }
    }
    for (int64_t i = 0; i < supers; ++i) set_half(at + m.factors_at + 2 * i, any_half(random, -9));
    for (int64_t i = 0; floats && i < kLanes; ++i) {
      set_float(at + m.factors_at + 4 * i, 1 + random.uniform() / 2);
    }
    const int size = scale_bytes(shape.scales);
    for (int64_t i = 0; i < numbers; ++i) {
      set_number(random, shape.scales, at + m.scales_at + i * size);
      uint8_t* beside = at + m.minima_at + i * scale_bytes(addend);
      if (shape.addend == Addend::kZeros) {  // -1 to -8
        set_half(beside, static_cast<uint16_t>(0xBC00 + (random.below(4) << 10)));
      } else if (shape.addend == Addend::kMinima) {
        set_number(random, addend, beside);
      }
    }
  }
  return m;
}

struct Inputs {
  Activations x;
  std::unique_ptr<Guarded<float>> f32;
  std::unique_ptr<Guarded<uint8_t>> encoded;

  Inputs(const Kernels& kernels, const Matrix& m, const float* values, int64_t rows) {
    x.rows = rows;
    x.cols = m.cols;
    x.needs = encoding_of(m);
    f32 = std::make_unique<Guarded<float>>(rows * m.cols);
    std::memcpy(f32->data(), values, rows * m.cols * sizeof(float));
    x.f32 = f32->data();
    encoded = std::make_unique<Guarded<uint8_t>>(encoding_bytes(x));
    place(x, encoded->data());
    kernels.encode(x, 0, rows);
  }

  double value(int64_t row, int64_t col) const {
    if (x.needs & kInt8) {
      const Int8Block& block = x.int8[row * (x.cols / kBlock) + col / kBlock];
      return double{block.scale} * block.q[col % kBlock];
    }
    if (x.needs & kBf16) {
      uint32_t word = static_cast<uint32_t>(x.bf16[row * round_up(x.cols, 2) + col]) << 16;
      float value;
      std::memcpy(&value, &word, 4);
      return value;
    }
    return x.f32[row * x.cols + col];
  }
};

std::vector<float> product(const Kernels& kernels, const Matrix& m, const Activations& x) {
  Guarded<float> y(x.rows * m.rows);
  kernels.linear(m, x, y.data(), m.rows, 0, m.tiles());
  return std::vector<float>(y.data(), y.data() + y.size());
}

// Compares y with a sum in double; the error of a float sum grows with its length.
void check_values(const Matrix& m, const Inputs& in, const std::vector<float>& y) {
  Guarded<float> weights(m.cols);
  for (int64_t o = 0; o < m.rows; ++o) {
    generic_kernels().matrix_row(m, o, weights.data());
    for (int64_t r = 0; r < in.x.rows; ++r) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < m.cols; ++i) {
        double term = weights[i] * in.value(r, i);
        sum += term;
        size += std::fabs(term);
      }
      // Minima and quants cancel, so the terms of the sum are larger than the products.
      double bound = 1e-6 * (size + 64) * 16;
      float got = y[r * m.rows + o];
      CHECK(std::fabs(got - sum) <= bound, "layout %d row %d output %d: %g, not %g",
            static_cast<int>(m.layout), static_cast<int>(r), static_cast<int>(o), got, sum);
    }
  }
}

void check_matrix(Random& random, const Shape& shape, int64_t rows, int64_t outputs, int64_t cols) {
  const Matrix m = random_matrix(random, shape, outputs, cols);
  std::vector<float> values(rows * cols);
  fill(random, values.data(), rows * cols);
  const Inputs expected_in(generic_kernels(), m, values.data(), rows);
  const std::vector<float> expected = product(generic_kernels(), m, expected_in.x);
  check_values(m, expected_in, expected);
  for (const Kernels* target : targets()) {
    const int layout = static_cast<int>(shape.layout);
    const Inputs in(*target, m, values.data(), rows);
    CHECK(!std::memcmp(in.encoded->data(), expected_in.encoded->data(), in.encoded->size()),
          "%s: encoding of layout %d", target->isa, layout);
    const std::vector<float> y = product(*target, m, in.x);
    bool own = m.layout == Layout::kBf16;  // bf16 sums round as the target does
    if (own) check_values(m, in, y);
    for (size_t i = 0; i < y.size() && !own; ++i) {
      CHECK(same_bits(y[i], expected[i]), "%s: layout %d, %d rows, output %d: %a, not %a",
            target->isa, layout, static_cast<int>(rows), static_cast<int>(i), y[i], expected[i]);
    }
    // One row and one range of tiles, separately.
    const int64_t row = random.below(rows), tile = random.below(m.tiles());
    const Inputs alone(*target, m, values.data() + row * cols, 1);
    const int64_t from = tile * kLanes, to = outputs < from + kLanes ? outputs : from + kLanes;
    Guarded<float> part(to);
    std::memset(part.data(), 0, to * sizeof(float));
    target->linear(m, alone.x, part.data(), outputs, tile, tile + 1);
    for (int64_t o = 0; o < to; ++o) {
      float want = o < from ? 0.0f : y[row * outputs + o];
      CHECK(same_bits(part[o], want), "%s: layout %d, row %d of %d alone, output %d: %a, not %a",
            target->isa, layout, static_cast<int>(row), static_cast<int>(rows),
            static_cast<int>(o), part[o], want);
    }
    Guarded<float> weights(cols), expected_weights(cols);
    target->matrix_row(m, outputs - 1, weights.data());
    generic_kernels().matrix_row(m, outputs - 1, expected_weights.data());
    CHECK(!std::memcmp(weights.data(), expected_weights.data(), cols * sizeof(float)),
          "%s: weights of layout %d", target->isa, layout);
  }
}

constexpr int64_t kPoisoned = 768;  // inputs of a row

// A NaN or an infinity makes only its own row non-finite.
void check_poison(const Shape& shape, float poison) {
  Random random(9);
  const Matrix m = random_matrix(random, shape, 20, kPoisoned);
  std::vector<float> values(3 * kPoisoned);
  fill(random, values.data(), 3 * kPoisoned);
  values[kPoisoned + 40] = poison;
  for (const Kernels* target : targets()) {
    const Inputs in(*target, m, values.data(), 3);
    const std::vector<float> y = product(*target, m, in.x);
    for (int64_t i = 0; i < 60; ++i) {
      CHECK(std::isfinite(y[i]) == (i / 20 != 1), "%s: layout %d, %g in row 1, output %d is %g",
            target->isa, static_cast<int>(shape.layout), poison, static_cast<int>(i), y[i]);
    }
  }
}

}  // namespace

void test_linear() {
  Random random(3);
  int64_t number = 0;
  for (const Shape& shape : kShapes) {
    const bool blocks = quant_bits(shape.layout) > 0 || shape.layout == Layout::kF8;
    const int64_t group = shape.scales == Scales::kCodes ? kSuper
                          : shape.group > 32             ? shape.group
                                                         : 32;
    for (int64_t rows : {1, 2, 3, 5, 8, 13, 33}) {
      if (!runs(number++)) continue;
      check_matrix(random, shape, rows, 1 + random.below(70), group * (1 + random.below(4)));
      if (!blocks) check_matrix(random, shape, rows, 1 + random.below(70), 1 + random.below(70));
    }
    if (runs(number++)) check_matrix(random, shape, 70, 48, 768 * 2);  // more than a panel
    if (!runs(number++)) continue;
    for (float poison : {NAN, INFINITY, -INFINITY}) check_poison(shape, poison);
  }
}

}  // namespace pdserve
