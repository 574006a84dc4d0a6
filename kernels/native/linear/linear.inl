// Products of encoded activations with packed weights, whatever their layout.

// Weights in groups of 32. Where there are no minima, the offset is 2 to the power of kShift.
template <Quants kQuants, int kShift>
static void quants_linear(const Matrix& m, const Activations& x, float* y, int64_t stride,
                          int64_t begin, int64_t end) {
  auto* run = &int8_linear<Kind<kQuants, false, false, kShift>>;
  if (m.has_minima) {
    run = m.wide_scales ? &int8_linear<Kind<kQuants, true, true>>
                        : &int8_linear<Kind<kQuants, false, true>>;
  }
  run(m, x, y, stride, begin, end);
}

static void linear(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                   int64_t end) {
  switch (m.layout) {
    case Layout::kF32: return float_linear<Layout::kF32>(m, x, y, stride, begin, end);
    case Layout::kF16: return float_linear<Layout::kF16>(m, x, y, stride, begin, end);
    case Layout::kBf16: return float_linear<Layout::kBf16>(m, x, y, stride, begin, end);
    case Layout::kU4: return quants_linear<Quants::kNibbles, 3>(m, x, y, stride, begin, end);
    case Layout::kU5: return quants_linear<Quants::kFives, 4>(m, x, y, stride, begin, end);
    case Layout::kU8: break;
  }
  if (m.group == 32) return quants_linear<Quants::kBytes, 7>(m, x, y, stride, begin, end);
  auto* run = m.has_minima ? &int8_linear<Kind<Quants::kBytes, true, true, 0, 16>>
                           : &int8_linear<Kind<Quants::kBytes, true, false, 7, 16>>;
  run(m, x, y, stride, begin, end);
}

// --- one row of weights, exactly as the stored format means it

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
    const bool wide = m.layout == Layout::kF32;
    for (int64_t i = 0; i < m.cols; ++i) {
      store(lanes, wide ? load_scales<true>(tile, i) : load_scales<false>(tile, i));
      out[i] = lanes[lane];
    }
    return;
  }
  const int bits = quant_bits(m.layout);
  float d = 0, least = 0;
  for (int64_t i = 0; i < m.cols; ++i) {
    if (i % m.group == 0) {
      const int64_t g = i / m.group;
      const uint8_t *ds = tile + m.scales_at, *ms = tile + m.minima_at;
      store(lanes, m.wide_scales ? load_scales<true>(ds, g) : load_scales<false>(ds, g));
      d = lanes[lane];
      if (m.has_minima) {
        store(lanes, m.wide_scales ? load_scales<true>(ms, g) : load_scales<false>(ms, g));
        least = lanes[lane];
      }
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
    const float scaled = (float)(q - m.offset) * d;  // rounded once, as the format means it
    out[i] = m.has_minima ? scaled + least : scaled;
  }
}
