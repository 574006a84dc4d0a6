// Products with weights of 2 to 8 bits that are levels; activations int8 per block of 32.

// A register tile is kRows rows times kTiles tiles of outputs.
static constexpr int kFewRows = kRegisters >= 32 ? 8 : kRegisters >= 8 ? 4 : 2;  // with one tile
static constexpr int kManyRows = kRegisters >= 32 ? 6 : kFewRows;  // with kManyTiles
static constexpr int kManyTiles = kRegisters >= 32 ? 2 : 1;
static constexpr int64_t kSingleRows = 2 * kFewRows;  // more: kManyTiles at once
static constexpr int64_t kPanelBlocks = 20;  // two expanded tiles fit the first-level cache

// The storage of levels, see Layout; kSmall: bytes from 0 to 127; kBytes: any bytes.
enum class Quants { kNibbles, kFives, kFp4, kIq4, kTwos, kThrees, kSixes, kSmall, kBytes };

constexpr int block_bytes(Quants quants) {
  switch (quants) {
    case Quants::kNibbles:
    case Quants::kFp4:
    case Quants::kIq4: return 256;
    case Quants::kFives: return 320;
    case Quants::kTwos: return 128;
    case Quants::kThrees: return 192;
    case Quants::kSixes: return 384;
    case Quants::kSmall:
    case Quants::kBytes: break;
  }
  return 512;
}

template <Quants kQuants_, Scales kScales_, Addend kAddend_, int kShift_ = 0, int kGroup_ = 32,
          bool kExpanded_ = false>
struct Kind {
  static constexpr bool kExpanded = kExpanded_;  // expanded from packed levels, for many rows
  static constexpr Quants kQuants = kQuants_;
  static constexpr Scales kScales = kScales_;
  static constexpr Addend kAddend = kAddend_;
  static constexpr bool kOffset = kAddend == Addend::kNone;  // levels have an offset:
  static constexpr int kShift = kShift_;                   // 2 to the power of this
  static constexpr int kGroup = kGroup_;
  static constexpr int kHalves = 32 / kGroup;
  static constexpr bool kPacked = kQuants != Quants::kSmall && kQuants != Quants::kBytes;
  static constexpr bool kSmallLevels = kQuants != Quants::kBytes && kQuants != Quants::kIq4;
  static constexpr int kBlockBytes = block_bytes(kQuants);
  static constexpr int kScaleBytes = kHalves * 16 * scale_bytes(kScales);
  // Prefetch distance in bytes for products of few rows, as measured on Zen 4: packed weights into
  // the first-level cache, because their arithmetic is slower, 8-bit weights into the second.
  static constexpr int64_t kAhead = kPacked ? 16384 : 65536;
  static constexpr int kStreamBytes = kBlockBytes + (kOffset ? 1 : 2) * kScaleBytes;
  // Bytes of the next panel that each register tile prefetches per block, for many rows.
  static constexpr int kFetch = kQuants == Quants::kBytes ? 256 : kPacked ? 192 : 128;
  // With more rows than this, packed weights are first expanded, once for all rows.
  static constexpr int64_t kDirectRows = kQuants == Quants::kNibbles ? 64 : 32;
};

// Weights of adjacent tiles: pointers for the first tile, and the distance to the next tile.
struct Panel {
  const uint8_t* q;
  const uint8_t* d;
  const uint8_t* m;
  const uint8_t* factors;  // of Matrix
  int64_t next;
  int64_t blocks;
  const uint8_t* ahead;  // data that is needed later and may be prefetched
  int64_t first;         // number of its first block in the tile
  int64_t supers;        // of 256 columns in a tile
  int64_t group_step;    // of Matrix
};

template <Scales kScales>
PDS_INLINE F load_scales(const uint8_t* at, int64_t group) {
  if constexpr (kScales == Scales::kF32) return load((const float*)at + 16 * group);
  if constexpr (kScales == Scales::kBf16) return load_bf16((const uint16_t*)at + 16 * group);
  return load_f16((const uint16_t*)at + 16 * group);
}

// Returns the scales of a group in the tile `skip` bytes after the first.
template <class K>
PDS_INLINE F load_d(const Panel& w, int64_t skip, int64_t group) {
  if constexpr (K::kScales == Scales::kCodes) {
    const F codes = load_i8((const int8_t*)(w.d + skip) + 16 * group);
    return mul(codes, load_scales<Scales::kF16>(w.factors + skip, group * K::kGroup / kSuper));
  }
  if constexpr (K::kScales == Scales::kE4m3) {
    return div(load_e4m3(w.d + skip + 16 * group), load((const float*)(w.factors + skip)));
  }
  return load_scales<K::kScales>(w.d + skip, group);
}

// Returns the term added per unit of an activation: m, or -d * z.
template <class K>
PDS_INLINE F load_addend(const Panel& w, int64_t skip, int64_t group, F d) {
  if constexpr (K::kAddend == Addend::kZeros) {
    return mul(d, load_scales<Scales::kF16>(w.m + skip, group));
  }
  if constexpr (K::kScales == Scales::kCodes) {
    const F codes = load_i8((const int8_t*)(w.m + skip) + 16 * group);
    const int64_t super = w.supers + group * K::kGroup / kSuper;
    return mul(codes, load_scales<Scales::kF16>(w.factors + skip, super));
  }
  return load_scales<K::kScales>(w.m + skip, group);
}

template <class K>
PDS_INLINE B with_fifths(B nibbles, B fifths, int k) {
  if constexpr (K::kQuants == Quants::kFives) return with_fifth(nibbles, fifths, k);
  return nibbles;
}

// Converts nibbles to levels.
template <class K>
PDS_INLINE B levels_of(B nibbles) {
  if constexpr (K::kQuants == Quants::kFp4) return lookup(nibbles, kFp4Levels);
  if constexpr (K::kQuants == Quants::kIq4) return lookup(nibbles, kIq4Levels);
  return nibbles;
}

// Returns the levels of inputs 4k to 4k + 3 of the block at q.
template <class K>
PDS_INLINE B level_vector(const uint8_t* q, int k) {
  if constexpr (!K::kPacked) return load_b(q + 64 * k);
  if constexpr (K::kQuants == Quants::kTwos || K::kQuants == Quants::kThrees) {
    const B twos = pairs(load_b(q + 64 * (k / 4)), k % 4);
    if constexpr (K::kQuants == Quants::kTwos) return twos;
    return with_third(twos, load_b(q + 128), k);
  }
  const B both = load_b(q + 64 * (k % 4));
  const B nibbles = k < 4 ? low_nibbles(both) : high_nibbles(both);
  if constexpr (K::kQuants == Quants::kFives) return with_fifth(nibbles, load_b(q + 256), k);
  if constexpr (K::kQuants == Quants::kSixes) {
    return with_pair(nibbles, load_b(q + 256 + 64 * (k / 4)), k % 4);
  }
  return levels_of<K>(nibbles);
}

template <class K>
PDS_INLINE I dot_levels(I acc, B w, const int8_t* x) {
  if constexpr (K::kSmallLevels) return dot_small(acc, w, x);
  return dot(acc, w, x);
}

// acc += (sum of group) * d * d_x + m * d_x * sum of x, in this order on every path.
template <class K, int kRows, int kTiles>
PDS_INLINE void add_group(const Panel& w, int64_t group, const I (&sum)[kRows][kTiles],
                          const float (&scale)[kRows], const float (&scaled_sum)[kRows],
                          F (&acc)[kRows][kTiles]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    F d = load_d<K>(w, t * w.next, group);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      acc[r][t] = fma(to_float(sum[r][t]), mul(d, set1(scale[r])), acc[r][t]);
    }
    if constexpr (!K::kOffset) {
      F m = load_addend<K>(w, t * w.next, group, d);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][t] = fma(m, set1(scaled_sum[r]), acc[r][t]);
    }
  }
}

// Computes the dot products of a block; a vector of nibbles is read once for both of its halves.
template <class K, int kRows, int kTiles>
PDS_INLINE void add_block(const uint8_t* q, int64_t next, const Int8Block* x, int64_t x_stride,
                          I (&sum)[kRows][kTiles]) {
  static_assert(!K::kPacked || K::kBlockBytes >= 256, "levels of nibbles");
  B fifths[kTiles] = {};
  if constexpr (K::kQuants == Quants::kFives) {
    for (int t = 0; t < kTiles; ++t) fifths[t] = load_b(q + t * next + 256);
  }
#pragma GCC unroll 8
  for (int j = 0; j < (K::kPacked ? 4 : 8); ++j) {
    B low[kTiles], high[kTiles];
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
      low[t] = load_b(q + t * next + 64 * j);
      if constexpr (K::kPacked) {
        high[t] = levels_of<K>(with_fifths<K>(high_nibbles(low[t]), fifths[t], j + 4));
        low[t] = levels_of<K>(with_fifths<K>(low_nibbles(low[t]), fifths[t], j));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int8_t* in = x[r * x_stride].q + 4 * j;
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) sum[r][t] = dot_levels<K>(sum[r][t], low[t], in);
      if constexpr (K::kPacked) {
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) sum[r][t] = dot_levels<K>(sum[r][t], high[t], in + 16);
      }
    }
  }
}

template <class K, int kRows, int kTiles>
static void int8_product(const Panel& w, const Int8Block* x, int64_t x_stride, const Target& to) {
  constexpr int kHalves = K::kHalves;
  F acc[kRows][kTiles];
  load_sums(to, acc);
  for (int64_t b = 0; b < w.blocks; ++b) {
    const uint8_t* q = w.q + b * K::kBlockBytes;
    if constexpr (kTiles == 1 && !K::kExpanded) {
      // With few rows, memory is the bottleneck, and a matrix is one stream of bytes.
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
          if constexpr (!K::kOffset) scaled_sum[r] = block.scale * (float)-minus;
        } else {
          scaled_sum[r] = block.scaled_sum;
        }
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) {
          sum[r][t] = !K::kOffset ? set1_i(0) : shift_left(set1_i(minus), K::kShift);
        }
      }
      if constexpr (kHalves == 2) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          B levels[kTiles];
#pragma GCC unroll 8
          for (int t = 0; t < kTiles; ++t) levels[t] = level_vector<K>(q + t * w.next, 4 * half + j);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const int8_t* in = x[r * x_stride + b].q + 16 * half + 4 * j;
#pragma GCC unroll 8
            for (int t = 0; t < kTiles; ++t) sum[r][t] = dot_levels<K>(sum[r][t], levels[t], in);
          }
        }
      } else {
        add_block<K>(q, w.next, x + b, x_stride, sum);
      }
      const int64_t block = w.first + b;
      const int64_t group = kHalves == 2 ? 2 * block + half : group_of(block, w.group_step);
      add_group<K>(w, group, sum, scale, scaled_sum, acc);
    }
  }
  store_sums(to, acc);
}

// Calls the kernel for `rows` from 1 to kRows.
template <class K, int kRows, int kTiles>
static void int8_rows(const Panel& w, const Int8Block* x, int64_t x_stride, int64_t rows,
                      const Target& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return int8_rows<K, kRows - 1, kTiles>(w, x, x_stride, rows, to);
  }
  int8_product<K, kRows, kTiles>(w, x, x_stride, to);
}

// Computes all rows, kRows at a time.
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

// Expands the blocks of `from` in one tile to byte levels and float scales.
template <class K>
static void expand(const Panel& from, uint8_t* q, float* d, float* m) {
  for (int64_t b = 0; b < from.blocks; ++b) {
    const uint8_t* block = from.q + K::kBlockBytes * b;
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) store_b(q + 512 * b + 64 * k, level_vector<K>(block, k));
    for (int half = 0; half < K::kHalves; ++half) {
      const int64_t number = from.first + b, to = K::kHalves * b + half;
      const int64_t group = K::kHalves == 2 ? 2 * number + half : group_of(number, from.group_step);
      const F scale = load_d<K>(from, 0, group);
      store(d + 16 * to, scale);
      if constexpr (!K::kOffset) store(m + 16 * to, load_addend<K>(from, 0, group, scale));
    }
  }
}

// Multiplies many rows by packed weights, which are expanded one panel at a time for all rows.
template <class K, int kTiles>
static void expanded_product(const Panel& all, const Activations& x, Target to) {
  struct alignas(64) Tile {
    uint8_t q[kPanelBlocks * 512];
    float d[kPanelBlocks * 16 * K::kHalves];
    float m[kPanelBlocks * 16 * K::kHalves];
  } tile[kTiles];
  const int64_t panels = (all.blocks + kPanelBlocks - 1) / kPanelBlocks;
  const int64_t step = (all.blocks + panels - 1) / panels;
  for (int64_t b = 0; b < all.blocks; b += step) {
    const int64_t blocks = all.blocks - b < step ? all.blocks - b : step;
    for (int t = 0; t < kTiles; ++t) {
      const int64_t skip = t * all.next;
      Panel from = {all.q + skip + b * K::kBlockBytes, all.d + skip, all.m + skip,
                    all.factors + skip, 0, blocks, nullptr, b, all.supers, all.group_step};
      expand<K>(from, tile[t].q, tile[t].d, tile[t].m);
    }
    Panel panel = {tile[0].q, (const uint8_t*)tile[0].d, (const uint8_t*)tile[0].m, nullptr,
                   sizeof(Tile), blocks, all.ahead + b * K::kBlockBytes * kTiles, 0, 0, group_step(1)};
    to.resume = b > 0;
    constexpr Quants kLevels = K::kSmallLevels ? Quants::kSmall : Quants::kBytes;
    constexpr Addend kAddend = K::kOffset ? Addend::kNone : Addend::kMinima;
    using Expanded = Kind<kLevels, Scales::kF32, kAddend, K::kShift, K::kGroup, true>;
    int8_all<Expanded, kManyRows, kTiles>(
        panel, x.int8 + b, all.blocks, x.rows, to);
  }
}

template <class K>
static void int8_linear(const Matrix& m, const Activations& x, float* y, int64_t stride,
                        int64_t begin, int64_t end) {
  const int64_t blocks = m.cols / 32;
  for (int64_t tile = begin; tile < end;) {
    const uint8_t* at = m.data.get() + tile * m.tile_bytes;
    Panel w = {at, at + m.scales_at, at + m.minima_at, at + m.factors_at, m.tile_bytes, blocks,
               at + kManyTiles * m.tile_bytes, 0, m.cols / kSuper, m.group_step};
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
