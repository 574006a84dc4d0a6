// Products with weights that are floats of 8, 16 and 32 bits.

static constexpr int kFloatTiles = kRegisters >= 32 ? 4 : 2;
static constexpr int kFloatRows = kRegisters >= 32 ? 6 : 2;

template <Layout kLayout>
struct Floats {  // one input, or a pair of them
  static constexpr int kInputs = 1;
  static constexpr int kBytes = kLayout == Layout::kF16 ? 32 : 64;
  using In = float;
  PDS_INLINE const In* inputs(const Activations& x) { return x.f32; }
  PDS_INLINE F step(F acc, const uint8_t* w, const In* x) {
    if constexpr (kLayout == Layout::kF16) {
      return fma(load_f16((const uint16_t*)w), set1(*x), acc);
    } else {
      return fma(load((const float*)w), set1(*x), acc);
    }
  }
};

template <>
struct Floats<Layout::kBf16> {
  static constexpr int kInputs = 2;
  static constexpr int kBytes = 64;
  using In = uint16_t;
  PDS_INLINE const In* inputs(const Activations& x) { return x.bf16; }
  PDS_INLINE F step(F acc, const uint8_t* w, const In* x) { return dot_bf16(acc, load_b(w), x); }
};

template <class K, int kRows, int kTiles>
static void float_product(const uint8_t* w, int64_t next, int64_t steps, const typename K::In* x,
                          const Target& to) {
  F acc[kRows][kTiles];
  load_sums(to, acc);
  for (int64_t s = 0; s < steps; ++s) {
    if constexpr (kRows <= 2) {
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) {
        __builtin_prefetch(w + s * K::kBytes + (t + kTiles) * next);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[r][t] = K::step(acc[r][t], w + s * K::kBytes + t * next,
                            x + (r * steps + s) * K::kInputs);
      }
    }
  }
  store_sums(to, acc);
}

template <class K, int kRows, int kTiles>
static void float_rows(const uint8_t* w, int64_t next, int64_t steps, const typename K::In* x,
                       int64_t rows, const Target& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return float_rows<K, kRows - 1, kTiles>(w, next, steps, x, rows, to);
  }
  float_product<K, kRows, kTiles>(w, next, steps, x, to);
}

template <Layout kLayout>
static void float_linear(const Matrix& m, const Activations& x, float* y, int64_t stride,
                         int64_t begin, int64_t end) {
  using K = Floats<kLayout>;
  const int64_t steps = (m.cols + K::kInputs - 1) / K::kInputs;
  for (int64_t tile = begin; tile < end;) {
    const uint8_t* at = m.data.get() + tile * m.tile_bytes;
    const bool full = end - tile >= kFloatTiles;
    for (int64_t r = 0; r < x.rows; r += kFloatRows) {
      const int64_t rows = x.rows - r < kFloatRows ? x.rows - r : kFloatRows;
      const typename K::In* in = K::inputs(x) + r * steps * K::kInputs;
      Target to = {y + r * stride + 16 * tile, stride, m.rows - 16 * tile, false};
      if (full) {
        float_rows<K, kFloatRows, kFloatTiles>(at, m.tile_bytes, steps, in, rows, to);
      } else {
        float_rows<K, kFloatRows, 1>(at, m.tile_bytes, steps, in, rows, to);
      }
    }
    tile += full ? kFloatTiles : 1;
  }
}

// 8-bit weights; each is scaled before the multiplication.
template <int kRows, int kTiles>
static void float8_product(const Matrix& m, const uint8_t* tile, const float* x, const Target& to) {
  F acc[kRows][kTiles];
  load_sums(to, acc);
  for (int64_t i = 0; i < m.cols;) {
    const uint8_t* d = tile + m.scales_at + i / m.group * 64;
    F scale[kTiles];
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {  // load_e4m3 gives value / 256; d < 2^119 (pack.cpp)
      scale[t] = mul(load((const float*)(d + t * m.tile_bytes)), set1(256.0f));
    }
    for (const int64_t end = i + m.group; i < end; ++i) {
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) {
        if (kRows <= 2 && i % 4 == 0) {
          __builtin_prefetch(tile + (t + kTiles) * m.tile_bytes + 16 * i);
        }
        const F w = mul(load_e4m3(tile + t * m.tile_bytes + 16 * i), scale[t]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r][t] = fma(w, set1(x[r * m.cols + i]), acc[r][t]);
      }
    }
  }
  store_sums(to, acc);
}

template <int kRows, int kTiles>
static void float8_rows(const Matrix& m, const uint8_t* tile, const float* x, int64_t rows,
                        const Target& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return float8_rows<kRows - 1, kTiles>(m, tile, x, rows, to);
  }
  float8_product<kRows, kTiles>(m, tile, x, to);
}

static void float8_linear(const Matrix& m, const Activations& x, float* y, int64_t stride,
                          int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end;) {
    const uint8_t* at = m.data.get() + tile * m.tile_bytes;
    const bool full = end - tile >= kFloatTiles;
    for (int64_t r = 0; r < x.rows; r += kFloatRows) {
      const int64_t rows = x.rows - r < kFloatRows ? x.rows - r : kFloatRows;
      Target to = {y + r * stride + 16 * tile, stride, m.rows - 16 * tile, false};
      if (full) {
        float8_rows<kFloatRows, kFloatTiles>(m, at, x.f32 + r * m.cols, rows, to);
      } else {
        float8_rows<kFloatRows, 1>(m, at, x.f32 + r * m.cols, rows, to);
      }
    }
    tile += full ? kFloatTiles : 1;
  }
}
