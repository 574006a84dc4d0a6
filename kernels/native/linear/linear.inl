// Products of encoded activations with packed weights of any layout.

using Run = void(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                 int64_t end);

// Computes the product for integers in groups of any size. An offset is 2 to the power of kShift.
template <Quants kQuants, int kShift>
static Run* run_of_integers(const Matrix& m) {
  const bool half = m.scales == Scales::kF16;
  if (m.addend == Addend::kZeros) {
    return half ? &int8_linear<Kind<kQuants, Scales::kF16, Addend::kZeros>>
                : &int8_linear<Kind<kQuants, Scales::kF32, Addend::kZeros>>;
  }
  return half ? &int8_linear<Kind<kQuants, Scales::kF16, Addend::kNone, kShift>>
              : &int8_linear<Kind<kQuants, Scales::kF32, Addend::kNone, kShift>>;
}

// Dispatches over the kinds that stored formats are packed as (pack.cpp).
static Run* run_of(const Matrix& m) {
  constexpr Scales kHalf = Scales::kF16, kCodes = Scales::kCodes;
  constexpr Addend kNone = Addend::kNone, kMinima = Addend::kMinima;
  const bool codes = m.scales == kCodes, minima = m.addend == kMinima;
  switch (m.layout) {
    case Layout::kF32: return &float_linear<Layout::kF32>;
    case Layout::kF16: return &float_linear<Layout::kF16>;
    case Layout::kBf16: return &float_linear<Layout::kBf16>;
    case Layout::kF8: return &float8_linear;
    case Layout::kU2: return &int8_linear<Kind<Quants::kTwos, kCodes, kMinima, 0, 16>>;
    case Layout::kU3: return &int8_linear<Kind<Quants::kThrees, kCodes, kNone, 2, 16>>;
    case Layout::kU6: return &int8_linear<Kind<Quants::kSixes, kCodes, kNone, 5, 16>>;
    case Layout::kU4:
      if (codes) return &int8_linear<Kind<Quants::kNibbles, kCodes, kMinima>>;
      return minima ? &int8_linear<Kind<Quants::kNibbles, kHalf, kMinima>>
                    : run_of_integers<Quants::kNibbles, 3>(m);
    case Layout::kU5:
      return codes    ? &int8_linear<Kind<Quants::kFives, kCodes, kMinima>>
             : minima ? &int8_linear<Kind<Quants::kFives, kHalf, kMinima>>
                      : &int8_linear<Kind<Quants::kFives, kHalf, kNone, 4>>;
    case Layout::kU8:
      return m.group == 16 ? &int8_linear<Kind<Quants::kBytes, Scales::kF32, kNone, 7, 16>>
                           : run_of_integers<Quants::kBytes, 7>(m);
    case Layout::kFp4:
      return m.scales == kHalf          ? &int8_linear<Kind<Quants::kFp4, kHalf, kNone, 4, 16>>
             : m.scales == Scales::kBf16 ? &int8_linear<Kind<Quants::kFp4, Scales::kBf16, kNone, 4>>
                                         : &int8_linear<Kind<Quants::kFp4, Scales::kE4m3, kNone, 4, 16>>;
    case Layout::kIq4: break;
  }
  return codes ? &int8_linear<Kind<Quants::kIq4, kCodes, kNone, 7>>
               : &int8_linear<Kind<Quants::kIq4, kHalf, kNone, 7>>;
}

static void linear(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                   int64_t end) {
  run_of(m)(m, x, y, stride, begin, end);
}

// --- one row of weights, with the exact values of the stored format

static F any_scales(Scales scales, const uint8_t* at, int64_t group) {
  switch (scales) {
    case Scales::kF16: return load_scales<Scales::kF16>(at, group);
    case Scales::kBf16: return load_scales<Scales::kBf16>(at, group);
    case Scales::kF32: return load_scales<Scales::kF32>(at, group);
    case Scales::kCodes: return load_i8((const int8_t*)at + 16 * group);
    case Scales::kE4m3: break;
  }
  return load_e4m3(at + 16 * group);
}

// Returns the d of the group of input i, or its addend if `addend`.
static float group_number(const Matrix& m, const uint8_t* tile, int64_t lane, int64_t i,
                          bool addend) {
  float lanes[16];
  const bool zeros = addend && m.addend == Addend::kZeros;
  const uint8_t* at = tile + (addend ? m.minima_at : m.scales_at);
  store(lanes, any_scales(zeros ? Scales::kF16 : m.scales, at, i / m.group));
  const float number = lanes[lane];
  if (zeros || (m.scales != Scales::kCodes && m.scales != Scales::kE4m3)) return number;
  const bool codes = m.scales == Scales::kCodes;
  const int64_t super = codes ? i / kSuper + (addend ? m.cols / kSuper : 0) : 0;
  store(lanes, any_scales(codes ? Scales::kF16 : Scales::kF32, tile + m.factors_at, super));
  return codes ? number * lanes[lane] : number / lanes[lane];
}

// Returns the level of input i of an output; `block` points to the output's first byte in the
// block.
static int level_at(Layout layout, const uint8_t* block, int64_t i) {
  const int64_t j = i % 32 / 4;  // the vector of its inputs
  block += i % 4;
  const int nibble = block[64 * (j % 4)] >> (j < 4 ? 0 : 4) & 15;
  const int pair = j % 4 * 2;
  switch (layout) {
    case Layout::kU2: return block[64 * (j / 4)] >> pair & 3;
    case Layout::kU3: return (block[64 * (j / 4)] >> pair & 3) | (block[128] >> j & 1) << 2;
    case Layout::kU5: return nibble | (block[256] >> j & 1) << 4;
    case Layout::kU6: return nibble | (block[256 + 64 * (j / 4)] >> pair & 3) << 4;
    case Layout::kU8: return block[64 * j];
    case Layout::kFp4: return kFp4Levels[nibble];
    case Layout::kIq4: return kIq4Levels[nibble];
    default: return nibble;
  }
}

static void matrix_row(const Matrix& m, int64_t row, float* out) {
  const uint8_t* tile = m.data.get() + row / 16 * m.tile_bytes;
  const int64_t lane = row % 16;
  float lanes[16];
  if (m.layout == Layout::kBf16) {
    const uint16_t* w = (const uint16_t*)tile;
    for (int64_t i = 0; i < m.cols; ++i) {
      uint32_t word = (uint32_t)w[i / 2 * 32 + 2 * lane + i % 2] << 16;
      __builtin_memcpy(out + i, &word, 4);
    }
    return;
  }
  if (m.layout == Layout::kF16 || m.layout == Layout::kF32) {
    const Scales type = m.layout == Layout::kF32 ? Scales::kF32 : Scales::kF16;
    for (int64_t i = 0; i < m.cols; ++i) {
      store(lanes, any_scales(type, tile, i));
      out[i] = lanes[lane];
    }
    return;
  }
  const int bits = quant_bits(m.layout);
  float d = 0, addend = 0;
  for (int64_t i = 0; i < m.cols; ++i) {
    if (i % m.group == 0) {
      d = group_number(m, tile, lane, i, false);
      if (m.addend != Addend::kNone) addend = group_number(m, tile, lane, i, true);
    }
    if (m.layout == Layout::kF8) {
      store(lanes, load_e4m3(tile + 16 * i));
      out[i] = lanes[lane] * 256.0f * d;
      continue;
    }
    const int q = level_at(m.layout, tile + 64 * bits * (i / 32) + 4 * lane, i);
    const float minus = m.addend == Addend::kZeros ? addend : (float)-m.offset;
    const float scaled = ((float)q + minus) * d;  // rounded once, as the format defines it
    out[i] = m.addend == Addend::kMinima ? scaled + addend : scaled;
  }
}
