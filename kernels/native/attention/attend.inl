// Paged attention in one pass over the keys with a running softmax (Milakov and Gimelshein, Online
// normalizer calculation for softmax, arXiv:1805.02867; the tiling of Dao et al., FlashAttention,
// arXiv:2205.14135).
//
// The definition of a query's result, independent of tiling: for each tile of 64 keys aligned to
// position 0, over the keys that the query sees, in order:
//   score[key] = sum over dims, by fma from 0, of (q * scale * log2 e) * k
//   m = largest score; p[key] = 2^(score - m)
//   l[lane] = (p[lane] + p[16 + lane]) + (p[32 + lane] + p[48 + lane])
//   acc[dim] = sum over keys, by fma from 0, of p * v
// and over the tiles, in order, starting from M = -inf and L = A = 0 (with a sink: M = sink * log2
// e and L[0] = 1):
//   M' = max(M, m); A = fma(acc, 2^(m - M'), A * 2^(M - M')); L the same with l
// then out = A * (1 / sum(L)). Tiles without a visible key are skipped. kI8: the scale of k
// multiplies the score, that of v the p of acc. The content of invisible slots never affects a
// result.

// Scratch of a task in floats; each part is a multiple of a cache line.
struct ScratchLayout {
  int64_t q, running, tile, s, keys, values, end;
};

// Returns whether the task has enough queries to unpack tiles; latent layers are always unpacked.
static bool unpacks(const Attend& task) {
  return task.kv.latent || task.tokens * task.group > 2 * kRowTile;
}

static ScratchLayout layout(const Attend& task) {
  int64_t rows = task.tokens * task.group, padded = round_up(task.kv.value_dim(), kLanes);
  ScratchLayout at;
  at.q = 0;
  at.running = at.q + round_up(rows * task.kv.head_dim, kLanes);
  at.tile = at.running + tile_floats(task);
  at.s = at.tile + kRowTile * (padded + kLanes) + kLanes;
  at.keys = at.s + kRowTile * kKeyTile;
  int64_t keys = unpacks(task) ? round_up(task.kv.head_dim, kLanes) * kKeyTile : 0;
  at.values = at.keys + keys;
  at.end = at.values + keys;  // values begin at a vector boundary of their key
  return at;
}

static int64_t attend_scratch(const Attend& task) { return layout(task).end; }

// Multiplies queries by the scale, into [rows][head_dim].
static void scale_queries(const Attend& task, float* to) {
  // Weights are powers of two; with a cap, the factor log2 e follows the cap.
  F factor = set1(task.soft_cap > 0 ? task.scale : task.scale * 1.44269504f);
  int64_t size = task.group * task.kv.head_dim;  // of a token: its heads are adjacent
  for (int64_t token = 0; token < task.tokens; ++token, to += size) {
    const float* q = task.q + token * task.q_stride;
    each_vector(size, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      store_some(to + i, mul(load_some(q + i, n), factor), n);
    });
  }
}

// Merges the results of a tile into those of the previous tiles, for rows [row, row + count).
static void merge(const Attend& task, int64_t index, int64_t row, int64_t count, const float* acc,
                  const float* most, float* running, float* running_most) {
  int64_t width = round_up(task.kv.value_dim(), kLanes) + kLanes;
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
  int64_t sums = rows * (round_up(task.kv.value_dim(), kLanes) + kLanes);
  for (int64_t i = 0; i < sums; i += kLanes) store(running + i, zero());
  for (int64_t i = 0; i < rows; i += kLanes) store(running + sums + i, set1(kNothing));
  if (!task.sinks) return;
  const int64_t padded = round_up(task.kv.value_dim(), kLanes);
  for (int64_t row = 0; row < rows; ++row) {
    running[sums + row] = task.sinks[row % task.group] * 1.44269504f;
    running[row * (padded + kLanes) + padded] = 1;
  }
}

static void finish(const Attend& task, const float* running) {
  int64_t value_dim = task.kv.value_dim(), padded = round_up(value_dim, kLanes);
  for (int64_t token = 0; token < task.tokens; ++token) {
    for (int64_t head = 0; head < task.group; ++head, running += padded + kLanes) {
      F inverse = set1(1.0f / reduce_add(load(running + padded)));
      float* out = task.out + token * task.out_stride + head * value_dim;
      each_vector(value_dim, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
        store_some(out + i, mul(load(running + i), inverse), n);
      });
    }
  }
}

// Computes tiles [begin, end), each into a separate state, or merged into the running state.
static void compute(const Attend& task, int64_t begin, int64_t end, float* states, bool merging,
                    float* scratch) {
  int64_t rows = task.tokens * task.group, size = row_tile(rows);
  int64_t head_dim = task.kv.head_dim, width = round_up(task.kv.value_dim(), kLanes) + kLanes;
  ScratchLayout at = layout(task);
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
      tile = unpack(task.kv, tile, groups, keys, values);
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
  int64_t width = round_up(task.kv.value_dim(), kLanes) + kLanes;
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
