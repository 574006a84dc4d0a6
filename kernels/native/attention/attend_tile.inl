// One tile of keys for some queries: scores, weights, and the weighted sum of values. attend.inl
// defines them.

static constexpr int kRowTile = kRegisters >= 32 ? 6 : 3;  // queries whose sums stay in registers,
static constexpr int kVecTile = kRegisters >= 32 ? 4 : 2;  // times vectors of keys or of dims
static constexpr int64_t kGroups = kKeyTile / kLanes;      // blocks are whole groups of 16 keys
static constexpr float kNothing = -__builtin_inff();

// --- A tile of keys

// The locations of a tile's keys by groups of 16, in the pool or unpacked to floats.
struct KeyTile {
  const uint8_t* key[kGroups];    // dim d of 16 keys at key + d * key_stride
  const uint8_t* value[kGroups];  // key j of a group at value + j * value_stride
  const float* key_scale[kGroups];  // kI8 only, for 16 keys
  const float* value_scale[kGroups];
  int64_t key_stride = 0, value_stride = 0;  // bytes
};

// Returns the groups of the tile with a key that some query sees; others may not be in the pool.
struct Groups { int64_t begin, end; };
// Keys of a tile, relative to its first.
struct Span { int64_t begin, end; };

PDS_INLINE int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

// Returns the keys of the tile that the token-th token of the task sees.
static Span seen(const Attend& task, int64_t token, int64_t tile) {
  int64_t origin = tile * kKeyTile, end = seen_end(task, token) - origin;
  int64_t begin = task.window > 0 ? task.position + token + 1 - task.window - origin : -origin;
  return {clamp(begin, kKeyTile), clamp(end, kKeyTile)};
}

static Groups needed(const Attend& task, int64_t tile) {
  int64_t begin = seen(task, 0, tile).begin, end = seen(task, task.tokens - 1, tile).end;
  return {begin / kLanes, ceil_div(end, kLanes)};
}

static KeyTile locate(const Attend& task, int64_t tile, Groups groups) {
  const KvLayer& kv = task.kv;
  int64_t size = kv_size(kv.type), head_bytes = kv.block_size * kv.head_dim * size;
  KeyTile found;
  found.key_stride = kv.block_size * size;
  found.value_stride = kv.head_dim * size;
  for (int64_t g = 0; g < kGroups; ++g) {
    // Unneeded groups point to a needed one.
    int64_t there = g < groups.begin ? groups.begin : g >= groups.end ? groups.end - 1 : g;
    int64_t position = tile * kKeyTile + there * kLanes;
    int64_t offset = position % kv.block_size;
    const uint8_t* block = kv.data + task.blocks[position / kv.block_size] * kv.block_bytes;
    int64_t value_head = (kv.latent ? 0 : kv.kv_heads) + task.kv_head;
    found.value[g] = block + value_head * head_bytes + offset * kv.head_dim * size;
    found.key[g] = kv.latent ? found.value[g] : block + task.kv_head * head_bytes + offset * size;
    const float* scales =
        (const float*)(block + kv.vectors() / kv.block_size * head_bytes) + offset;
    bool scaled = kv.type == KvType::kI8;
    found.key_scale[g] = scaled ? scales + task.kv_head * kv.block_size : nullptr;
    found.value_scale[g] = scaled ? scales + value_head * kv.block_size : nullptr;
  }
  return found;
}

// Unpacks the tile to floats, [head_dim][64] keys and [64][width] values, for tasks of many
// queries.
template <KvType type>
static KeyTile unpack(const KeyTile& from, Groups groups, int64_t head_dim, float* keys,
                      float* values) {
  int64_t width = round_up(head_dim, kLanes);
  KeyTile to = from;
  to.key_stride = kKeyTile * 4;
  to.value_stride = width * 4;
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    float* key = keys + g * kLanes;
    float* value = values + g * kLanes * width;
    to.key[g] = (const uint8_t*)key;
    to.value[g] = (const uint8_t*)value;
    for (int64_t d = 0; d < head_dim; ++d) {
      store(key + d * kKeyTile, load_kv<type>(from.key[g] + d * from.key_stride));
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      const uint8_t* row = from.value[g] + j * from.value_stride;
      each_vector(head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const uint8_t* at = row + i * kv_size(type);
        F a = n == kLanes ? load_kv<type>(at) : load_kv_n<type>(at, n);
        store(value + j * width + i, a);
      });
    }
  }
  return to;
}

// The same for a latent layer: its keys are read as stored, [64][width], and transposed.
template <KvType type>
static KeyTile unpack_latent(const KvLayer& kv, const KeyTile& from, Groups groups, float* keys,
                             float* values) {
  int64_t width = round_up(kv.head_dim, kLanes);
  KeyTile to = from;
  to.key_stride = kKeyTile * 4;
  to.value_stride = width * 4;
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    float* key = keys + g * kLanes;
    float* rows = values + g * kLanes * width;
    to.key[g] = (const uint8_t*)key;
    to.value[g] = (const uint8_t*)(rows + kv.head_dim - kv.latent);
    for (int64_t j = 0; j < kLanes; ++j) {
      const uint8_t* row = from.value[g] + j * from.value_stride;
      each_vector(kv.head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        const uint8_t* at = row + i * kv_size(type);
        F a = n == kLanes ? load_kv<type>(at) : load_kv_n<type>(at, n);
        store(rows + j * width + i, a);
      });
    }
    for (int64_t d = 0; d < kv.head_dim; ++d) {
      for (int64_t j = 0; j < kLanes; ++j) key[d * kKeyTile + j] = rows[j * width + d];
    }
  }
  return to;
}

template <KvType type>
static KeyTile unpack(const KvLayer& kv, const KeyTile& from, Groups groups, float* keys,
                      float* values) {
  if (kv.latent) return unpack_latent<type>(kv, from, groups, keys, values);
  return unpack<type>(from, groups, kv.head_dim, keys, values);
}

static KeyTile unpack(const KvLayer& kv, const KeyTile& from, Groups groups, float* keys,
                      float* values) {
  switch (kv.type) {
    case KvType::kF32: return unpack<KvType::kF32>(kv, from, groups, keys, values);
    case KvType::kBf16: return unpack<KvType::kBf16>(kv, from, groups, keys, values);
    case KvType::kF16: return unpack<KvType::kF16>(kv, from, groups, keys, values);
    default: return unpack<KvType::kI8>(kv, from, groups, keys, values);
  }
}

// --- The two products of a tile, for R queries

// Both read a tile of the pool and prefetch the same offsets of the next tile (kAhead), which is in
// another block, beyond the hardware prefetcher. They prefetch into the second-level cache, since
// the first supports too few outstanding misses for the memory's bandwidth.

#define PDS_UNROLL _Pragma("GCC unroll 8")

// Computes s[r][16 * group + key] for V groups from `group`; q is [R][head_dim].
template <KvType type, int R, int V, bool kAhead>
static __attribute__((noinline)) void scores(const float* q, int64_t head_dim, const KeyTile& tile,
                                             const KeyTile& next, int64_t group, float* s) {
  F sum[R][V];
  const uint8_t *key[V], *ahead[V];
  const float* query[R];
  PDS_UNROLL for (int v = 0; v < V; ++v) {
    key[v] = tile.key[group + v];
    ahead[v] = next.key[group + v];
  }
  PDS_UNROLL for (int r = 0; r < R; ++r) {
    query[r] = q + r * head_dim;
    PDS_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    F k[V];
    PDS_UNROLL for (int v = 0; v < V; ++v) {
      k[v] = load_kv<type>(key[v]);
      key[v] += tile.key_stride;
      if (kAhead) {
        __builtin_prefetch(ahead[v], 0, 2);
        ahead[v] += tile.key_stride;
      }
    }
    PDS_UNROLL for (int r = 0; r < R; ++r) {
      F x = set1(query[r][d]);
      PDS_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = fma(x, k[v], sum[r][v]);
    }
  }
  PDS_UNROLL for (int r = 0; r < R; ++r) {
    PDS_UNROLL for (int v = 0; v < V; ++v) {
      store(s + r * kKeyTile + (group + v) * kLanes, sum[r][v]);
    }
  }
}

// Computes acc[r][dim] += p[r][key] * value[key][dim] over `keys`, for V vectors of dims from
// `dim`. kTail: the last vector has `tail` dims. kFresh: acc, with `width` floats per row, starts
// from 0.
template <KvType type, int R, int V, bool kTail, bool kFresh, bool kAhead>
static __attribute__((noinline)) void values(const float* p, const KeyTile& tile,
                                             const KeyTile& next, Span keys, int64_t dim,
                                             int64_t tail, float* acc, int64_t width) {
  constexpr int kLine = 64 / (int)(kLanes * kv_size(type));  // vectors
  F sum[R][V];
  PDS_UNROLL for (int r = 0; r < R; ++r) {
    PDS_UNROLL for (int v = 0; v < V; ++v) {
      sum[r][v] = kFresh ? zero() : load(acc + r * width + dim + v * kLanes);
    }
  }
  for (int64_t at = keys.begin; at < keys.end;) {
    int64_t group = at / kLanes, end = (group + 1) * kLanes;
    if (end > keys.end) end = keys.end;
    int64_t offset = (at - group * kLanes) * tile.value_stride + dim * kv_size(type);
    const uint8_t *value = tile.value[group] + offset, *ahead = next.value[group] + offset;
    for (; at < end; ++at, value += tile.value_stride, ahead += tile.value_stride) {
      F x[V];
      PDS_UNROLL for (int v = 0; v < V; ++v) {
        const uint8_t* from = value + v * kLanes * kv_size(type);
        x[v] = kTail && v == V - 1 ? load_kv_n<type>(from, tail) : load_kv<type>(from);
        if (kAhead && v % kLine == 0) __builtin_prefetch(ahead + v * kLanes * kv_size(type), 0, 2);
      }
      PDS_UNROLL for (int r = 0; r < R; ++r) {
        F weight = set1(p[r * kKeyTile + at]);
        PDS_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
      }
    }
  }
  PDS_UNROLL for (int r = 0; r < R; ++r) {
    PDS_UNROLL for (int v = 0; v < V; ++v) store(acc + r * width + dim + v * kLanes, sum[r][v]);
  }
}

// Calls CALL(V) with V = count as a constant, 1 <= count <= kVecTile.
#define PDS_BY_COUNT(count, CALL)                                \
  switch (count) {                                               \
    case 1: CALL(1); break;                                      \
    case 2: CALL(2); break;                                      \
    case 3: CALL((kVecTile >= 3 ? 3 : 1)); break;                \
    default: CALL(kVecTile); break;                              \
  }

template <KvType type, int R, bool kAhead>
static void all_scores(const float* q, int64_t head_dim, const KeyTile& tile, const KeyTile& next,
                       Groups groups, float* s) {
  for (int64_t g = groups.begin; g < groups.end; g += kVecTile) {
    int64_t count = groups.end - g < kVecTile ? groups.end - g : kVecTile;
#define PDS_CALL(V) scores<type, R, V, kAhead>(q, head_dim, tile, next, g, s)
    PDS_BY_COUNT(count, PDS_CALL)
#undef PDS_CALL
  }
}

template <KvType type, int R, bool kFresh, bool kAhead>
static void all_values(const float* p, const KeyTile& tile, const KeyTile& next, Span keys,
                       int64_t head_dim, float* acc, int64_t width) {
  if (!kFresh && keys.begin >= keys.end) return;
  int64_t whole = head_dim / kLanes, tail = head_dim % kLanes;
  int64_t slices = ceil_div(whole, kVecTile), dim = 0;
  for (int64_t left = whole; left > 0; --slices) {  // of about equal widths
    int64_t count = ceil_div(left, slices);
#define PDS_CALL(V) \
  values<type, R, V, false, kFresh, kAhead>(p, tile, next, keys, dim, 0, acc, width)
    PDS_BY_COUNT(count, PDS_CALL)
#undef PDS_CALL
    left -= count;
    dim += count * kLanes;
  }
  if (tail) {
    values<type, R, 1, true, kFresh, kAhead>(p, tile, next, keys, dim, tail, acc, width);
  }
}
#undef PDS_BY_COUNT
#undef PDS_UNROLL

// --- A tile for R queries

// Converts one query's scores to weights in place, with their sums per lane; returns the largest
// score.
static float weigh(const Attend& task, const KeyTile& tile, Span span, float* s, float* l) {
  F x[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    x[g] = load(s + g * kLanes);
    if (task.kv.type == KvType::kI8) x[g] = mul(x[g], load(tile.key_scale[g]));
    if (task.soft_cap > 0) {
      F capped = tanh(div(x[g], set1(task.soft_cap)));
      x[g] = mul(capped, set1(task.soft_cap * 1.44269504f));
    }
  }
  if (span.begin > 0 || span.end < kKeyTile) {
    for (int64_t g = 0; g < kGroups; ++g) {
      int64_t begin = clamp(span.begin - g * kLanes, kLanes);
      x[g] = select(lanes(begin, clamp(span.end - g * kLanes, kLanes)), x[g], set1(kNothing));
    }
  }
  float most = reduce_max(max(max(x[0], x[1]), max(x[2], x[3])));
  F base = set1(most == kNothing ? 0.0f : most);
  for (int64_t g = 0; g < kGroups; ++g) x[g] = exp2_nonpositive(sub(x[g], base));
  store(l, add(add(x[0], x[1]), add(x[2], x[3])));
  for (int64_t g = 0; g < kGroups; ++g) {
    if (task.kv.type == KvType::kI8) x[g] = mul(x[g], load(tile.value_scale[g]));
    store(s + g * kLanes, x[g]);
  }
  return most;
}

// Queries of a task in row order (by token, then by head) are computed in tiles of about equal
// size, at most kRowTile.
PDS_INLINE int64_t row_tile(int64_t rows) { return ceil_div(rows, ceil_div(rows, kRowTile)); }

// Computes rows [row, row + R) for one tile: acc[r] of head_dim (padded to vectors) followed by l
// of 16 lanes, and most[r]. Results of rows that see no key of the tile are undefined.
template <KvType type, int R, bool kAhead>
static void tile_rows(const Attend& task, const KeyTile& tile, const KeyTile& next, int64_t index,
                      int64_t row, const float* q, float* s, float* acc, float* most) {
  int64_t head_dim = task.kv.head_dim, value_dim = task.kv.value_dim();
  int64_t padded = round_up(value_dim, kLanes), width = padded + kLanes;
  Span spans[R], all{kKeyTile, 0}, joint{0, kKeyTile};
  int64_t token = row / task.group, head = row - token * task.group;
  for (int r = 0; r < R; ++r) {
    Span span = seen(task, token, index);
    spans[r] = span;
    if (span.begin < all.begin) all.begin = span.begin;
    if (span.end > all.end) all.end = span.end;
    if (span.begin > joint.begin) joint.begin = span.begin;
    if (span.end < joint.end) joint.end = span.end;
    if (++head == task.group) head = 0, ++token;
  }
  if (all.begin >= all.end) return;
  Groups groups{all.begin / kLanes, ceil_div(all.end, kLanes)};
  all_scores<type, R, kAhead>(q, head_dim, tile, next, groups, s);
  for (int r = 0; r < R; ++r) {
    most[r] = weigh(task, tile, spans[r], s + r * kKeyTile, acc + r * width + padded);
  }
  if (joint.begin == all.begin && joint.end == all.end) {
    return all_values<type, R, true, kAhead>(s, tile, next, joint, value_dim, acc, width);
  }
  // At a border: keys that all rows see are computed together, the others row by row.
  if (joint.end < joint.begin) joint.end = joint.begin;
  for (int r = 0; r < R; ++r) {
    Span before{spans[r].begin, spans[r].end < joint.begin ? spans[r].end : joint.begin};
    all_values<type, 1, true, false>(s + r * kKeyTile, tile, next, before, value_dim,
                                     acc + r * width, width);
  }
  all_values<type, R, false, kAhead>(s, tile, next, joint, value_dim, acc, width);
  for (int r = 0; r < R; ++r) {
    Span after{spans[r].begin > joint.end ? spans[r].begin : joint.end, spans[r].end};
    all_values<type, 1, false, false>(s + r * kKeyTile, tile, next, after, value_dim,
                                      acc + r * width, width);
  }
}

using TileRows = void (*)(const Attend&, const KeyTile&, const KeyTile&, int64_t, int64_t,
                          const float*, float*, float*, float*);

template <KvType type, bool kAhead>
static TileRows tile_rows_of(int64_t rows) {
  constexpr bool wide = kRowTile >= 6;
  switch (rows) {
    case 1: return tile_rows<type, 1, kAhead>;
    case 2: return tile_rows<type, 2, kAhead>;
    case 3: return tile_rows<type, 3, kAhead>;
    case 4: return tile_rows<type, wide ? 4 : 1, kAhead>;
    case 5: return tile_rows<type, wide ? 5 : 1, kAhead>;
    default: return tile_rows<type, wide ? 6 : 1, kAhead>;
  }
}

static TileRows tile_rows_of(KvType type, bool unpacked, int64_t rows) {
  if (unpacked) return tile_rows_of<KvType::kF32, false>(rows);
  switch (type) {
    case KvType::kF32: return tile_rows_of<KvType::kF32, true>(rows);
    case KvType::kBf16: return tile_rows_of<KvType::kBf16, true>(rows);
    case KvType::kF16: return tile_rows_of<KvType::kF16, true>(rows);
    default: return tile_rows_of<KvType::kI8, true>(rows);
  }
}
