// Paged attention in one pass over the keys with a running softmax (Milakov and Gimelshein, Online
// normalizer calculation for softmax, arXiv:1805.02867; the tiling of Dao et al., FlashAttention,
// arXiv:2205.14135), and the writing of keys and values.
//
// What a query's result is, whatever the tiling: for each tile of 64 keys aligned to position 0,
// over the keys that the query sees, in order:
//   score[key] = sum over dims, by fma from 0, of (q * scale * log2 e) * k
//   m = largest score; p[key] = 2^(score - m)
//   l[lane] = (p[lane] + p[16 + lane]) + (p[32 + lane] + p[48 + lane])
//   acc[dim] = sum over keys, by fma from 0, of p * v
// and over the tiles, in order, from M = -inf and L = A = 0:
//   M' = max(M, m); A = fma(acc, 2^(m - M'), A * 2^(M - M')); L the same with l
// then out = A * (1 / sum(L)). A tile without a seen key is left out. kI8: the scale of k multiplies
// the score, that of v the p of acc. What is in slots that are not seen never reaches a result.

static constexpr int kRowTile = kRegisters >= 32 ? 6 : 3;  // queries whose sums stay in registers,
static constexpr int kVecTile = kRegisters >= 32 ? 4 : 2;  // times vectors of keys or of dims
static constexpr int64_t kGroups = kKeyTile / kLanes;      // blocks are whole groups of 16 keys
static constexpr float kNothing = -__builtin_inff();

// The stored values, 16 or n at a time, as floats.
template <KvType type>
PDS_INLINE F load_kv(const uint8_t* p) {
  if constexpr (type == KvType::kF32) return load((const float*)p);
  if constexpr (type == KvType::kBf16) return load_bf16((const uint16_t*)p);
  if constexpr (type == KvType::kF16) return load_f16((const uint16_t*)p);
  if constexpr (type == KvType::kI8) return load_i8((const int8_t*)p);
}
template <KvType type>
PDS_INLINE F load_kv_n(const uint8_t* p, int64_t n) {
  if constexpr (type == KvType::kF32) return load_n((const float*)p, n);
  if constexpr (type == KvType::kBf16) return load_bf16_n((const uint16_t*)p, n);
  if constexpr (type == KvType::kF16) return load_f16_n((const uint16_t*)p, n);
  if constexpr (type == KvType::kI8) return load_i8_n((const int8_t*)p, n);
}

static constexpr int64_t kv_size(KvType type) {
  return type == KvType::kF32 ? 4 : type == KvType::kI8 ? 1 : 2;
}

// --- Writing

static I to_bf16(F x) {
  I b = as_int(x);
  I odd = and_(shift_right(b, 16), set1_i(1));
  I rounded = shift_right(add(b, add(odd, set1_i(0x7fff))), 16);
  return select(unordered(x), set1_i(0x7fc0), rounded);
}

// Writes 16 (or n) of a row of floats, in the stored type, to `to`.
static void narrow(const float* x, int64_t n, KvType type, float inverse, uint8_t* to) {
  F a = load_some(x, n);
  if (type == KvType::kF32) store((float*)to, a);
  if (type == KvType::kBf16) store_u16((uint16_t*)to, to_bf16(a));
  if (type == KvType::kF16) store_f16((uint16_t*)to, a);
  if (type == KvType::kI8) store_i8((int8_t*)to, to_int(mul(a, set1(inverse))));
}

// The largest magnitude of a head; NaN wins, as the largest bits.
static float largest(const float* x, int64_t n) {
  I most = set1_i(0);
  each_vector(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    most = max(most, as_int(magnitude(load_some(x + i, count))));
  });
  int32_t bits = reduce_max(most);
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

// One head of one token to consecutive elements `stride` apart.
static void store_head(const KvLayer& kv, const float* x, uint8_t* to, int64_t stride,
                       float* scale_to) {
  int64_t size = kv_size(kv.type);
  float inverse = 0;
  if (kv.type == KvType::kI8) {
    float most = largest(x, kv.head_dim);
    *scale_to = most / 127.0f;
    inverse = most == 0 ? 0 : 127.0f / most;
  }
  each_vector(kv.head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    alignas(64) uint8_t values[64];
    narrow(x + i, n, kv.type, inverse, values);
    uint8_t* at = to + i * stride * size;
    if (stride == 1) {
      __builtin_memcpy(at, values, (size_t)(n * size));
    } else if (size == 4) {
      for (int64_t j = 0; j < n; ++j) __builtin_memcpy(at + j * stride * 4, values + j * 4, 4);
    } else if (size == 2) {
      for (int64_t j = 0; j < n; ++j) __builtin_memcpy(at + j * stride * 2, values + j * 2, 2);
    } else {
      for (int64_t j = 0; j < n; ++j) at[j * stride] = values[j];
    }
  });
}

static void store_kv(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  int64_t size = kv_size(kv.type), head_bytes = kv.block_size * kv.head_dim * size;
  int64_t offset = slot % kv.block_size;
  uint8_t* block = kv.data + slot / kv.block_size * kv.block_bytes;
  float* scales = (float*)(block + 2 * kv.kv_heads * head_bytes) + offset;
  for (int64_t head = 0; head < kv.kv_heads; ++head, k += kv.head_dim, v += kv.head_dim) {
    int64_t value_head = kv.kv_heads + head;
    store_head(kv, k, block + head * head_bytes + offset * size, kv.block_size,
               scales + head * kv.block_size);
    store_head(kv, v, block + value_head * head_bytes + offset * kv.head_dim * size, 1,
               scales + value_head * kv.block_size);
  }
}

// --- A tile of keys

// Where the keys of a tile lie, by groups of 16: in the pool, or unpacked to floats.
struct KeyTile {
  const uint8_t* key[kGroups];    // dim d of 16 keys at key + d * key_stride
  const uint8_t* value[kGroups];  // key j of a group at value + j * value_stride
  const float* key_scale[kGroups];  // kI8 only, of 16 keys
  const float* value_scale[kGroups];
  int64_t key_stride = 0, value_stride = 0;  // bytes
};

// Groups of the tile that hold a key some query sees; what is outside may not exist.
struct Groups { int64_t begin, end; };
// Keys of the tile that a query sees.
struct Span { int64_t begin, end; };

PDS_INLINE int64_t clamp(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

// Of the token-th token of the task.
static Span seen(const Attend& task, int64_t token, int64_t tile) {
  int64_t end = task.position + token + 1 - tile * kKeyTile;
  int64_t begin = task.window > 0 ? end - task.window : -tile * kKeyTile;
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
    // Groups that are not needed point to one that is.
    int64_t there = g < groups.begin ? groups.begin : g >= groups.end ? groups.end - 1 : g;
    int64_t position = tile * kKeyTile + there * kLanes;
    int64_t offset = position % kv.block_size;
    const uint8_t* block = kv.data + task.blocks[position / kv.block_size] * kv.block_bytes;
    found.key[g] = block + task.kv_head * head_bytes + offset * size;
    found.value[g] =
        block + (kv.kv_heads + task.kv_head) * head_bytes + offset * kv.head_dim * size;
    const float* scales = (const float*)(block + 2 * kv.kv_heads * head_bytes) + offset;
    bool scaled = kv.type == KvType::kI8;
    found.key_scale[g] = scaled ? scales + task.kv_head * kv.block_size : nullptr;
    found.value_scale[g] =
        scaled ? scales + (kv.kv_heads + task.kv_head) * kv.block_size : nullptr;
  }
  return found;
}

// The tile as floats, [head_dim][64] keys and [64][width] values, for tasks of many queries.
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

static KeyTile unpack(KvType type, const KeyTile& from, Groups groups, int64_t head_dim,
                      float* keys, float* values) {
  switch (type) {
    case KvType::kF32: return unpack<KvType::kF32>(from, groups, head_dim, keys, values);
    case KvType::kBf16: return unpack<KvType::kBf16>(from, groups, head_dim, keys, values);
    case KvType::kF16: return unpack<KvType::kF16>(from, groups, head_dim, keys, values);
    default: return unpack<KvType::kI8>(from, groups, head_dim, keys, values);
  }
}

// --- The two products of a tile, for R queries

// Both read a tile of the pool while they prefetch the same places of the next one (kAhead), which
// lies in another block, where the hardware does not look: into the second cache, since the first
// has too few misses in flight for what memory delivers.

#define PDS_UNROLL _Pragma("GCC unroll 8")

// s[r][16 * group + key] for V groups from `group`; q is [R][head_dim].
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

// acc[r][dim] += p[r][key] * value[key][dim] over `keys`, for V vectors of dims from `dim`; kTail:
// the last one has `tail` dims. acc has `width` floats a row; kFresh: it starts from 0.
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

// CALL(V) with V = count, 1 <= count <= kVecTile, known to the compiler.
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

// Makes weights of one query's scores, in place, and their sums by lane; returns the largest score.
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

// Queries of a task in row order (token by token, its heads side by side) are computed in tiles of
// about equal size, at most kRowTile.
PDS_INLINE int64_t row_tile(int64_t rows) { return ceil_div(rows, ceil_div(rows, kRowTile)); }

// The results of rows [row, row + R) for one tile: acc[r] of head_dim (padded to vectors) and then
// l of 16 lanes, most[r]. Rows that see no key of the tile get no defined result.
template <KvType type, int R, bool kAhead>
static void tile_rows(const Attend& task, const KeyTile& tile, const KeyTile& next, int64_t index,
                      int64_t row, const float* q, float* s, float* acc, float* most) {
  int64_t head_dim = task.kv.head_dim, padded = round_up(head_dim, kLanes);
  int64_t width = padded + kLanes;
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
    return all_values<type, R, true, kAhead>(s, tile, next, joint, head_dim, acc, width);
  }
  // At a border: keys that all rows see together, those before and after row by row.
  if (joint.end < joint.begin) joint.end = joint.begin;
  for (int r = 0; r < R; ++r) {
    Span before{spans[r].begin, spans[r].end < joint.begin ? spans[r].end : joint.begin};
    all_values<type, 1, true, false>(s + r * kKeyTile, tile, next, before, head_dim,
                                     acc + r * width, width);
  }
  all_values<type, R, false, kAhead>(s, tile, next, joint, head_dim, acc, width);
  for (int r = 0; r < R; ++r) {
    Span after{spans[r].begin > joint.end ? spans[r].begin : joint.end, spans[r].end};
    all_values<type, 1, false, false>(s + r * kKeyTile, tile, next, after, head_dim,
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

// --- A task

// Scratch of a task, floats, each part a multiple of a cache line.
struct Layout {
  int64_t q, running, tile, s, keys, values, end;
};

// From how many queries on unpacking a tile pays.
static bool unpacks(const Attend& task) { return task.tokens * task.group > 2 * kRowTile; }

static Layout layout(const Attend& task) {
  int64_t rows = task.tokens * task.group, padded = round_up(task.kv.head_dim, kLanes);
  Layout at;
  at.q = 0;
  at.running = at.q + round_up(rows * task.kv.head_dim, kLanes);
  at.tile = at.running + tile_floats(task);
  at.s = at.tile + kRowTile * (padded + kLanes) + kLanes;
  at.keys = at.s + kRowTile * kKeyTile;
  at.values = at.keys + (unpacks(task) ? padded * kKeyTile : 0);
  at.end = at.values + (unpacks(task) ? padded * kKeyTile : 0);
  return at;
}

static int64_t attend_scratch(const Attend& task) { return layout(task).end; }

// Queries times the scale, [rows][head_dim].
static void scale_queries(const Attend& task, float* to) {
  // Weights are powers of two; with a cap, the factor log2 e comes after it.
  F factor = set1(task.soft_cap > 0 ? task.scale : task.scale * 1.44269504f);
  int64_t size = task.group * task.kv.head_dim;  // of a token: its heads are adjacent
  for (int64_t token = 0; token < task.tokens; ++token, to += size) {
    const float* q = task.q + token * task.q_stride;
    each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      store_some(to + i, mul(load_some(q + i, n), factor), n);
    });
  }
}

// Adds the results of a tile to those of the tiles before, for rows [row, row + count).
static void merge(const Attend& task, int64_t index, int64_t row, int64_t count, const float* acc,
                  const float* most, float* running, float* running_most) {
  int64_t width = round_up(task.kv.head_dim, kLanes) + kLanes;
  F before = load_n(running_most, count), here = load_n(most, count);
  F larger = max(before, here);
  F base = select(less(larger, set1(-3.4028235e38f)), zero(), larger);
  alignas(64) float old_factor[kLanes], new_factor[kLanes], maxima[kLanes];
  store(old_factor, exp2_nonpositive(sub(before, base)));
  store(new_factor, exp2_nonpositive(sub(here, base)));
  store(maxima, larger);
  int64_t token = row / task.group, head = row - token * task.group;
  for (int64_t r = 0; r < count; ++r, acc += width, running += width) {
    Span span = seen(task, token, index);
    if (++head == task.group) head = 0, ++token;
    if (span.begin >= span.end) continue;
    F a = set1(old_factor[r]), b = set1(new_factor[r]);
    for (int64_t i = 0; i < width; i += kLanes) {
      store(running + i, fma(load(acc + i), b, mul(load(running + i), a)));
    }
    running_most[r] = maxima[r];
  }
}

static void start(const Attend& task, float* running) {
  int64_t rows = task.tokens * task.group;
  int64_t sums = rows * (round_up(task.kv.head_dim, kLanes) + kLanes);
  for (int64_t i = 0; i < sums; i += kLanes) store(running + i, zero());
  for (int64_t i = 0; i < rows; i += kLanes) store(running + sums + i, set1(kNothing));
}

static void finish(const Attend& task, const float* running) {
  int64_t head_dim = task.kv.head_dim, padded = round_up(head_dim, kLanes);
  for (int64_t token = 0; token < task.tokens; ++token) {
    for (int64_t head = 0; head < task.group; ++head, running += padded + kLanes) {
      F inverse = set1(1.0f / reduce_add(load(running + padded)));
      float* out = task.out + token * task.out_stride + head * head_dim;
      each_vector(head_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(out + i, mul(load(running + i), inverse), n);
      });
    }
  }
}

// Tiles [begin, end): each into its own state, or merged into the running one.
static void compute(const Attend& task, int64_t begin, int64_t end, float* states, bool merging,
                    float* scratch) {
  int64_t rows = task.tokens * task.group, size = row_tile(rows);
  int64_t head_dim = task.kv.head_dim, width = round_up(head_dim, kLanes) + kLanes;
  Layout at = layout(task);
  bool unpacking = unpacks(task);
  float* running = scratch + at.running;
  scale_queries(task, scratch + at.q);
  KeyTile next = locate(task, begin, needed(task, begin));
  for (int64_t index = begin; index < end; ++index) {
    Groups groups = needed(task, index);
    KeyTile tile = next;
    if (index + 1 < end) {
      next = locate(task, index + 1, needed(task, index + 1));
    } else if (task.next) {
      int64_t first = first_tile(*task.next);
      next = locate(*task.next, first, needed(*task.next, first));
    }
    if (unpacking) {
      float *keys = scratch + at.keys, *values = scratch + at.values;
      tile = unpack(task.kv.type, tile, groups, head_dim, keys, values);
    }
    for (int64_t row = 0; row < rows; row += size) {
      int64_t count = rows - row < size ? rows - row : size;
      float* acc = merging ? scratch + at.tile : states + row * width;
      float* most = merging ? scratch + at.tile + kRowTile * width : states + rows * width + row;
      tile_rows_of(task.kv.type, unpacking, count)(task, tile, next, index, row,
                                                   scratch + at.q + row * head_dim,
                                                   scratch + at.s, acc, most);
      if (merging) {
        merge(task, index, row, count, acc, most, running + row * width,
              running + rows * width + row);
      }
    }
    if (!merging) states += tile_floats(task);
  }
}

static void attend(const Attend& task, float* scratch) {
  float* running = scratch + layout(task).running;
  start(task, running);
  compute(task, first_tile(task), end_tile(task), nullptr, true, scratch);
  finish(task, running);
}

static void attend_tiles(const Attend& task, int64_t begin, int64_t end, float* states,
                         float* scratch) {
  compute(task, begin, end, states, false, scratch);
}

static void attend_merge(const Attend& task, const float* states, float* scratch) {
  int64_t rows = task.tokens * task.group, size = row_tile(rows);
  int64_t width = round_up(task.kv.head_dim, kLanes) + kLanes;
  float* running = scratch + layout(task).running;
  start(task, running);
  for (int64_t index = first_tile(task); index < end_tile(task); ++index) {
    for (int64_t row = 0; row < rows; row += size) {
      int64_t count = rows - row < size ? rows - row : size;
      merge(task, index, row, count, states + row * width, states + rows * width + row,
            running + row * width, running + rows * width + row);
    }
    states += tile_floats(task);
  }
  finish(task, running);
}
