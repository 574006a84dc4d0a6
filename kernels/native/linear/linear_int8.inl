// Products with weights of 4, 5 and 8 bits; activations int8 per block of 32.

// A register tile is kRows rows times kTiles tiles of outputs.
static constexpr int kFewRows = kRegisters >= 32 ? 8 : kRegisters >= 8 ? 4 : 2;  // with one tile
static constexpr int kManyRows = kRegisters >= 32 ? 6 : kFewRows;  // with kManyTiles
static constexpr int kManyTiles = kRegisters >= 32 ? 2 : 1;
static constexpr int64_t kSingleRows = 2 * kFewRows;  // more: kManyTiles at once
static constexpr int64_t kPanelBlocks = 20;  // two tiles so wide, expanded, fit the first cache

enum class Quants { kNibbles, kFives, kSmall, kBytes };  // kSmall: bytes of 0 to 31

template <Quants kQuants_, bool kWide_, bool kMinima_, int kShift_ = 0, int kGroup_ = 32>
struct Kind {
  static constexpr Quants kQuants = kQuants_;
  static constexpr bool kWide = kWide_;      // scales and minima are float32
  static constexpr bool kMinima = kMinima_;  // else there is an offset,
  static constexpr int kShift = kShift_;     // 2 to the power of this
  static constexpr int kGroup = kGroup_;
  static constexpr bool kPacked = kQuants == Quants::kNibbles || kQuants == Quants::kFives;
  static constexpr int kBlockBytes = kQuants == Quants::kNibbles ? 256
                                     : kQuants == Quants::kFives ? 320 : 512;
  static constexpr int kScaleBytes = 32 / kGroup * (kWide ? 64 : 32);
  // How many bytes ahead the product of few rows prefetches, as measured on Zen 4: packed weights
  // into the first cache, because their arithmetic is slower, and weights of 8 bits into the second.
  static constexpr int64_t kAhead = kPacked ? 16384 : 65536;
  static constexpr int kStreamBytes = kBlockBytes + (kMinima ? 2 : 1) * kScaleBytes;
  // How many bytes of the next panel each register tile prefetches for each block, if rows are many.
  static constexpr int kFetch = kQuants == Quants::kBytes ? 256 : kPacked ? 192 : 128;
  // If there are more rows than this, packed weights are expanded first, once for all rows.
  static constexpr int64_t kDirectRows = kQuants == Quants::kNibbles ? 64 : 32;
};

// Weights of adjacent tiles: those of the first, and the distance to the same of the next.
struct Panel {
  const uint8_t* q;
  const uint8_t* d;
  const uint8_t* m;
  int64_t next;
  int64_t blocks;
  const uint8_t* ahead;  // what is needed later and may be fetched now
};

template <bool kWide>
PDS_INLINE F load_scales(const uint8_t* at, int64_t group) {
  if constexpr (kWide) {
    return load((const float*)at + 16 * group);
  } else {
    return load_f16((const uint16_t*)at + 16 * group);
  }
}

template <Quants kQuants>
PDS_INLINE I dot_quants(I acc, B w, const int8_t* x) {
  if constexpr (kQuants == Quants::kBytes) {
    return dot(acc, w, x);
  } else {
    return dot_small(acc, w, x);
  }
}

// acc += (sum of group) * d * d_x + m * d_x * sum of x, in this order on every path.
template <class K, int kRows, int kTiles>
PDS_INLINE void add_group(const Panel& w, int64_t group, const I (&sum)[kRows][kTiles],
                          const float (&scale)[kRows], const float (&scaled_sum)[kRows],
                          F (&acc)[kRows][kTiles]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    F d = load_scales<K::kWide>(w.d + t * w.next, group);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      acc[r][t] = fma(to_float(sum[r][t]), mul(d, set1(scale[r])), acc[r][t]);
    }
    if constexpr (K::kMinima) {
      F m = load_scales<K::kWide>(w.m + t * w.next, group);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][t] = fma(m, set1(scaled_sum[r]), acc[r][t]);
    }
  }
}

template <class K, int kRows, int kTiles>
static void int8_product(const Panel& w, const Int8Block* x, int64_t x_stride, const Target& to) {
  constexpr int kHalves = 32 / K::kGroup;
  constexpr int kLoads = (K::kPacked ? 4 : 8) / kHalves;
  static_assert(kHalves == 1 || !K::kPacked, "a vector of nibbles spans the block");
  F acc[kRows][kTiles];
  load_sums(to, acc);
  for (int64_t b = 0; b < w.blocks; ++b) {
    const uint8_t* q = w.q + b * K::kBlockBytes;
    if constexpr (kTiles == 1 && K::kQuants != Quants::kSmall) {
      // With few rows the arithmetic waits for the memory, and a matrix is one stream of bytes.
      const uint8_t* ahead = w.q + K::kAhead + b * K::kStreamBytes;
#pragma GCC unroll 16
      for (int at = 0; at < K::kStreamBytes; at += 64) __builtin_prefetch(ahead + at);
    } else {
      const uint8_t* ahead = w.ahead + b * K::kFetch;
#pragma GCC unroll 4
      for (int at = 0; at < K::kFetch; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    }
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      I sum[kRows][kTiles];
      float scale[kRows], scaled_sum[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Int8Block& block = x[r * x_stride + b];
        scale[r] = block.scale;
        int32_t minus = block.minus_sum;
        if constexpr (kHalves == 2) {
          minus = half == 0 ? block.minus_half : block.minus_sum - block.minus_half;
          if constexpr (K::kMinima) scaled_sum[r] = block.scale * (float)-minus;
        } else {
          scaled_sum[r] = block.scaled_sum;
        }
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) {
          sum[r][t] = K::kMinima ? set1_i(0) : shift_left(set1_i(minus), K::kShift);
        }
      }
      B fifths[kTiles];
      if constexpr (K::kQuants == Quants::kFives) {
        for (int t = 0; t < kTiles; ++t) fifths[t] = load_b(q + t * w.next + 256);
      }
#pragma GCC unroll 8
      for (int j = half * kLoads; j < (half + 1) * kLoads; ++j) {
        B low[kTiles], high[kTiles];
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) {
          low[t] = load_b(q + t * w.next + 64 * j);
          if constexpr (K::kPacked) {
            high[t] = high_nibbles(low[t]);
            low[t] = low_nibbles(low[t]);
          }
          if constexpr (K::kQuants == Quants::kFives) {
            low[t] = with_fifth(low[t], fifths[t], j);
            high[t] = with_fifth(high[t], fifths[t], j + 4);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const int8_t* in = x[r * x_stride + b].q + 4 * j;
#pragma GCC unroll 8
          for (int t = 0; t < kTiles; ++t) {
            sum[r][t] = dot_quants<K::kQuants>(sum[r][t], low[t], in);
          }
          if constexpr (K::kPacked) {
#pragma GCC unroll 8
            for (int t = 0; t < kTiles; ++t) {
              sum[r][t] = dot_quants<K::kQuants>(sum[r][t], high[t], in + 16);
            }
          }
        }
      }
      add_group<K>(w, b * kHalves + half, sum, scale, scaled_sum, acc);
    }
  }
  store_sums(to, acc);
}

// The kernel for `rows` of 1 to kRows.
template <class K, int kRows, int kTiles>
static void int8_rows(const Panel& w, const Int8Block* x, int64_t x_stride, int64_t rows,
                      const Target& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return int8_rows<K, kRows - 1, kTiles>(w, x, x_stride, rows, to);
  }
  int8_product<K, kRows, kTiles>(w, x, x_stride, to);
}

// All rows, kRows at a time.
template <class K, int kRows, int kTiles>
static void int8_all(Panel w, const Int8Block* x, int64_t x_stride, int64_t rows,
                     const Target& to) {
  for (int64_t r = 0; r < rows; r += kRows) {
    int64_t left = rows - r;
    Target part = to;
    part.y += r * to.stride;
    int8_rows<K, kRows, kTiles>(w, x + r * x_stride, x_stride, left < kRows ? left : kRows, part);
    w.ahead += K::kFetch * w.blocks;
  }
}

// Packed quants as bytes, and float scales, of the blocks of `from` in one tile.
template <class K>
static void expand(const Panel& from, uint8_t* q, float* d, float* m) {
  for (int64_t b = 0; b < from.blocks; ++b) {
    const uint8_t* block = from.q + K::kBlockBytes * b;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      B both = load_b(block + 64 * j), low = low_nibbles(both), high = high_nibbles(both);
      if constexpr (K::kQuants == Quants::kFives) {
        B fifths = load_b(block + 256);
        low = with_fifth(low, fifths, j);
        high = with_fifth(high, fifths, j + 4);
      }
      store_b(q + 512 * b + 64 * j, low);
      store_b(q + 512 * b + 64 * j + 256, high);
    }
    store(d + 16 * b, load_scales<K::kWide>(from.d, b));
    if constexpr (K::kMinima) store(m + 16 * b, load_scales<K::kWide>(from.m, b));
  }
}

// 4- and 5-bit weights against many rows: expanded a panel at a time, once for all of them.
template <class K, int kTiles>
static void expanded_product(const Panel& all, const Activations& x, Target to) {
  struct alignas(64) Expanded {
    uint8_t q[kPanelBlocks * 512];
    float d[kPanelBlocks * 16];
    float m[kPanelBlocks * 16];
  } tile[kTiles];
  const int64_t panels = (all.blocks + kPanelBlocks - 1) / kPanelBlocks;
  const int64_t step = (all.blocks + panels - 1) / panels;
  for (int64_t b = 0; b < all.blocks; b += step) {
    const int64_t blocks = all.blocks - b < step ? all.blocks - b : step;
    for (int t = 0; t < kTiles; ++t) {
      const int64_t skip = t * all.next;
      Panel from = {all.q + skip + b * K::kBlockBytes, all.d + skip + b * K::kScaleBytes,
                    all.m + skip + b * K::kScaleBytes, 0, blocks, nullptr};
      expand<K>(from, tile[t].q, tile[t].d, tile[t].m);
    }
    Panel panel = {tile[0].q, (const uint8_t*)tile[0].d, (const uint8_t*)tile[0].m,
                   sizeof(Expanded), blocks, all.ahead + b * K::kBlockBytes * kTiles};
    to.resume = b > 0;
    int8_all<Kind<Quants::kSmall, true, K::kMinima, K::kShift>, kManyRows, kTiles>(
        panel, x.int8 + b, all.blocks, x.rows, to);
  }
}

template <class K>
static void int8_linear(const Matrix& m, const Activations& x, float* y, int64_t stride,
                        int64_t begin, int64_t end) {
  const int64_t blocks = m.cols / 32;
  for (int64_t tile = begin; tile < end;) {
    const uint8_t* at = m.data.get() + tile * m.tile_bytes;
    Panel w = {at, at + m.scales_at, at + m.minima_at, m.tile_bytes, blocks,
               at + kManyTiles * m.tile_bytes};
    Target to = {y + 16 * tile, stride, m.rows - 16 * tile, false};
    const bool pair = end - tile >= kManyTiles;
    if (x.rows <= kSingleRows || !pair) {
      int8_all<K, kFewRows, 1>(w, x.int8, blocks, x.rows, to);
      ++tile;
      continue;
    }
    if constexpr (K::kPacked) {
      if (x.rows > K::kDirectRows) {
        expanded_product<K, kManyTiles>(w, x, to);
        tile += kManyTiles;
        continue;
      }
    }
    int8_all<K, kManyRows, kManyTiles>(w, x.int8, blocks, x.rows, to);
    tile += kManyTiles;
  }
}
