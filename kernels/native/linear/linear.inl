// Products of encoded activations with packed weights, whatever their layout.

using Run = void(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                 int64_t end);

// The product for integers with f16 or f32 scales. An offset is 2 to the power of kShift.
template <Quants kQuants, int kShift>
static Run* run_of_integers(const Matrix& m) {
  const bool half = m.scales == Scales::kF16;
  switch (m.least) {
    case Least::kNone:
      return half ? &int8_linear<Kind<kQuants, Scales::kF16, Least::kNone, kShift>>
                  : &int8_linear<Kind<kQuants, Scales::kF32, Least::kNone, kShift>>;
    case Least::kZeros: return &int8_linear<Kind<kQuants, Scales::kF16, Least::kZeros>>;
    case Least::kMinima: break;
  }
  return &int8_linear<Kind<kQuants, Scales::kF32, Least::kMinima>>;
}

// Each kind that a stored format is packed as (pack.cpp).
static Run* run_of(const Matrix& m) {
  const bool half = m.scales == Scales::kF16, minima = m.least == Least::kMinima;
  switch (m.layout) {
    case Layout::kF32: return &float_linear<Layout::kF32>;
    case Layout::kF16: return &float_linear<Layout::kF16>;
    case Layout::kBf16: return &float_linear<Layout::kBf16>;
    case Layout::kF8: return &float8_linear;
    case Layout::kU4:
      return half && minima ? &int8_linear<Kind<Quants::kNibbles, Scales::kF16, Least::kMinima>>
                            : run_of_integers<Quants::kNibbles, 3>(m);
    case Layout::kU5:
      return !minima ? &int8_linear<Kind<Quants::kFives, Scales::kF16, Least::kNone, 4>>
             : half  ? &int8_linear<Kind<Quants::kFives, Scales::kF16, Least::kMinima>>
                     : &int8_linear<Kind<Quants::kFives, Scales::kF32, Least::kMinima>>;
    case Layout::kU8:
      if (m.group != 16) return run_of_integers<Quants::kBytes, 7>(m);
      return minima ? &int8_linear<Kind<Quants::kBytes, Scales::kF32, Least::kMinima, 0, 16>>
                    : &int8_linear<Kind<Quants::kBytes, Scales::kF32, Least::kNone, 7, 16>>;
    case Layout::kFp4:
      if (m.group != 16) return &int8_linear<Kind<Quants::kFp4, Scales::kBf16, Least::kNone, 4>>;
      return half ? &int8_linear<Kind<Quants::kFp4, Scales::kF16, Least::kNone, 4, 16>>
                  : &int8_linear<Kind<Quants::kFp4, Scales::kF32, Least::kNone, 4, 16>>;
    case Layout::kIq4: break;
  }
  return half ? &int8_linear<Kind<Quants::kIq4, Scales::kF16, Least::kNone, 7>>
              : &int8_linear<Kind<Quants::kIq4, Scales::kF32, Least::kNone, 7>>;
}

static void linear(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                   int64_t end) {
  run_of(m)(m, x, y, stride, begin, end);
}

// --- one row of weights, exactly as the stored format means it

static F any_scales(Scales scales, const uint8_t* at, int64_t group) {
  switch (scales) {
    case Scales::kF16: return load_scales<Scales::kF16>(at, group);
    case Scales::kBf16: return load_scales<Scales::kBf16>(at, group);
    case Scales::kF32: break;
  }
  return load_scales<Scales::kF32>(at, group);
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
    for (int64_t i = 0; i < m.cols; ++i) {
      store(lanes, m.layout == Layout::kF32 ? load_scales<Scales::kF32>(tile, i)
                                            : load_scales<Scales::kF16>(tile, i));
      out[i] = lanes[lane];
    }
    return;
  }
  const int bits = quant_bits(m.layout);
  float d = 0, least = 0;
  for (int64_t i = 0; i < m.cols; ++i) {
    if (i % m.group == 0) {
      const int64_t g = i / m.group;
      store(lanes, any_scales(m.scales, tile + m.scales_at, g));
      d = lanes[lane];
      if (m.least != Least::kNone) {
        const Scales type = m.least == Least::kZeros ? Scales::kF16 : m.scales;
        store(lanes, any_scales(type, tile + m.minima_at, g));
        least = lanes[lane];
      }
    }
    if (m.layout == Layout::kF8) {
      store(lanes, load_e4m3(tile + 16 * i));
      out[i] = lanes[lane] * 256.0f * d;
      continue;
    }
    const int64_t b = i / 32, j = i % 32 / 4;
    int q;
    const uint8_t* block = tile + 64 * bits * b + 4 * lane + i % 4;  // this output's bytes
    if (bits < 8) {
      q = block[64 * (j % 4)] >> (j < 4 ? 0 : 4) & 15;
      if (bits == 5) q |= (block[256] >> j & 1) << 4;
    } else {
      q = block[64 * j];
    }
    if (m.layout == Layout::kFp4) q = kFp4Levels[q];
    if (m.layout == Layout::kIq4) q = kIq4Levels[q];
    const float minus = m.least == Least::kZeros ? least : (float)-m.offset;
    const float scaled = ((float)q + minus) * d;  // rounded once, as the format means it
    out[i] = m.least == Least::kMinima ? scaled + least : scaled;
  }
}
