// Sampling from one row of scores: the best one, Gumbel noise, floors (top_k, top_p, min_p).
//
// Loops over doubles and 64-bit integers are plain C in a fixed order, which compilers vectorize;
// products and sums are rounded separately, so that every target gives the same bits.

static constexpr float kNoScore = -__builtin_inff();

PDS_INLINE uint64_t double_bits(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  return bits;
}
PDS_INLINE double bits_double(uint64_t bits) {
  double x;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}

// --- noise: the operations of kernels/reference/sampling.py, in the same order

static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

PDS_INLINE uint64_t noise_mix(uint64_t x) {  // SplitMix64's finalizer
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

PDS_INLINE uint64_t noise_stream(const NoiseKey& key) {
  uint64_t x = noise_mix((uint64_t)key.seed + kGolden);
  x = noise_mix((x ^ (uint64_t)key.choice) + kGolden);
  return noise_mix((x ^ (uint64_t)key.position) + kGolden);
}

PDS_INLINE uint32_t noise_bits(uint64_t stream, int64_t id) {
  return (uint32_t)(noise_mix(stream + ((uint64_t)id + 1) * kGolden) >> 32);
}

PDS_INLINE double noise_log(double x) {
  uint64_t bits = double_bits(x);
  int64_t exponent = (int64_t)(bits >> 52) - 1023;  // x > 0
  double m = bits_double((bits & ((1ull << 52) - 1)) | (1023ull << 52));
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  double s = (m - 1.0) / (m + 1.0);
  double z = s * s;
  double p = 1.0 / 21;
  for (int i = 9; i >= 0; --i) {
    p = p * z;
    p = p + 1.0 / (2 * i + 1);
  }
  return (double)exponent * 0.6931471805599453 + (2.0 * s) * p;
}

static float noise_of(uint32_t bits) {
  return (float)-noise_log(-noise_log(((double)bits + 0.5) * 0x1p-32));
}

static void gumbel_at(const NoiseKey& key, const int64_t* ids, int64_t count, float* out) {
  uint64_t stream = noise_stream(key);
  for (int64_t i = 0; i < count; ++i) out[i] = noise_of(noise_bits(stream, ids[i]));
}

// Returns an upper bound of the noise in a few operations, at most 0.07 too high where it exceeds
// 3. With v = 1 - u: -log(-log(u)) <= -log(v), and log2(v) >= exponent + fraction, which are a
// float's bits read as an integer. `half` is 2^31 v rounded down; half = 0 gives 109, far above any
// noise. 2e-4 covers the rounding here and in noise_of: an integer below 2^31 as a float has a
// relative error of 2^-25, that is 2^6 / 2^23 in log2.
PDS_INLINE F noise_bound(I half) {
  F log2 = to_float(as_int(to_float(half)));
  return fma(log2, set1(-0.69314718f / 8388608.f), set1(158.f * 0.69314718f + 2e-4f));
}

static constexpr float kMostNoise = 22.9f;  // the largest is -log(-log(1 - 2^-33)) = 22.874

// Sums are monotonic under rounding, so a token whose bound does not beat the best cannot win.
static int64_t gumbel_argmax(const float* scores, float temperature, float floor,
                             const NoiseKey& key, int64_t count) {
  constexpr int64_t kChunk = 64;
  uint64_t stream = noise_stream(key);
  float best = kNoScore;
  int64_t winner = 0;
  alignas(64) float x[kChunk], bound[kLanes];
  alignas(64) int32_t half[kChunk];
  for (int64_t start = 0; start < count; start += kChunk) {
    uint32_t may_win = 0;
    for (int64_t at = 0; at < kChunk; at += kLanes) {
      int64_t left = count - start - at;
      F s = set1(kNoScore);
      if (left >= kLanes) {
        s = div(load(scores + start + at), set1(temperature));
      } else if (left > 0) {
        F some = div(load_n(scores + start + at, left), set1(temperature));
        s = select(lanes(0, left), some, s);
      }
      s = select(less(s, set1(floor)), set1(kNoScore), s);
      store(x + at, s);
      may_win |= bits(less(set1(best), add(s, set1(kMostNoise))));
    }
    if (!may_win) continue;
    for (int64_t i = 0; i < kChunk; ++i) half[i] = (int32_t)(~noise_bits(stream, start + i) >> 1);
    for (int64_t at = 0; at < kChunk; at += kLanes) {
      F most = add(load(x + at), noise_bound(load_i(half + at)));
      uint32_t near = bits(less(set1(best), most));
      if (!near) continue;
      store(bound, most);
      for (; near; near &= near - 1) {
        int lane = __builtin_ctz(near);
        if (!(bound[lane] > best)) continue;
        int64_t id = start + at + lane;
        float value = x[at + lane] + noise_of(noise_bits(stream, id));
        if (value > best) {
          best = value;
          winner = id;
        }
      }
    }
  }
  return winner;
}

// --- masks

static void apply_bitmask(const float* scores, const uint32_t* mask, int64_t count, float* out) {
  int64_t start = 0;
  for (; start + 32 <= count; start += 32) {
    uint32_t word = mask[start / 32];
    const float* x = scores + start;
    for (int i = 0; i < 32; ++i) out[start + i] = word >> i & 1 ? x[i] : kNoScore;
  }
  for (int64_t id = start; id < count; ++id) {
    out[id] = mask[start / 32] >> (id - start) & 1 ? scores[id] : kNoScore;
  }
}

// --- argmax

// Returns the index of the first NaN, or -1.
static int64_t first_nan(const float* scores, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] != scores[i]) return i;
  }
  return -1;
}

static int64_t argmax(const float* scores, int64_t count) {
  constexpr int64_t kStride = 1024;  // the best stride is remembered and searched at the end
  float best = kNoScore;
  int64_t at = 0;
  for (int64_t start = 0; start < count; start += kStride) {
    const float* x = scores + start;
    int64_t size = count - start < kStride ? count - start : kStride;
    F most0 = set1(kNoScore), most1 = most0, most2 = most0, most3 = most0, sums = zero();
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
      F x0 = load(x + i), x1 = load(x + i + 16), x2 = load(x + i + 32), x3 = load(x + i + 48);
      most0 = max(most0, x0);
      most1 = max(most1, x1);
      most2 = max(most2, x2);
      most3 = max(most3, x3);
      sums = add(sums, add(add(x0, x1), add(x2, x3)));
    }
    for (; i < size; i += kLanes) {
      int64_t n = size - i < kLanes ? size - i : kLanes;
      F some = load_n(x + i, n);
      sums = add(sums, some);
      most0 = max(most0, select(lanes(0, n), some, set1(kNoScore)));
    }
    if (any(unordered(sums))) {  // NaN, or infinities that cancel
      int64_t nan = first_nan(x, size);
      if (nan >= 0) return start + nan;
    }
    float most = reduce_max(max(max(most0, most1), max(most2, most3)));
    if (most > best) {
      best = most;
      at = start;
    }
  }
  while (at + 1 < count && scores[at] != best) ++at;
  return best == kNoScore ? 0 : at;
}

// --- floors

// Returns e^x for x <= 0, to 1e-14: 2^n times a Taylor polynomial over [-ln2 / 2, ln2 / 2].
PDS_INLINE double noise_exp(double x) {
  x = x < -700.0 ? -700.0 : x;
  double shifted = x * 1.4426950408889634 + 6755399441055744.0;  // its low bits are n
  double n = shifted - 6755399441055744.0;
  double r = x - n * 0x1.62e42fefa3800p-1;  // ln2 in two parts; this product is exact
  r = r - n * 0x1.ef35793c76730p-45;
  double p = 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return bits_double(double_bits(p) + (double_bits(shifted) << 52));
}

// Returns the sum of e^(x - peak); lane i of 16 adds elements i, i + 16, ...
static double sum_exp(const float* x, float peak, int64_t count) {
  double lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[l] += noise_exp((double)x[i + l] - (double)peak);
  }
  for (int64_t l = 0; i < count; ++i, ++l) lane[l] += noise_exp((double)x[i] - (double)peak);
  for (int64_t half = kLanes / 2; half; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
  }
  return lane[0];
}

static double log_sum_exp(const float* scores, int64_t count) {
  float peak = scores[argmax(scores, count)];
  return (double)peak + noise_log(sum_exp(scores, peak, count));
}

// Returns unsigned integers in the reverse order of the floats.
PDS_INLINE uint32_t descending(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (uint32_t)((int32_t)bits >> 31 & 0x7fffffff) ^ ~bits ^ 0x80000000u;
}
PDS_INLINE float from_descending(uint32_t key) {
  uint32_t bits = ~key ^ 0x80000000u;
  bits ^= (uint32_t)((int32_t)bits >> 31 & 0x7fffffff);
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Sorts ascending by bytes; `spare` has the same length.
static void radix_sort(uint32_t* keys, uint32_t* spare, int64_t count) {
  if (count <= 24) {
    for (int64_t i = 1; i < count; ++i) {
      uint32_t key = keys[i];
      int64_t j = i;
      for (; j && keys[j - 1] > key; --j) keys[j] = keys[j - 1];
      keys[j] = key;
    }
    return;
  }
  uint32_t starts[4][256] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int byte = 0; byte < 4; ++byte) ++starts[byte][keys[i] >> (8 * byte) & 255];
  }
  for (int byte = 0; byte < 4; ++byte) {
    uint32_t total = 0;
    for (uint32_t& start : starts[byte]) {
      uint32_t here = start;
      start = total;
      total += here;
    }
    for (int64_t i = 0; i < count; ++i) {
      spare[starts[byte][keys[i] >> (8 * byte) & 255]++] = keys[i];
    }
    uint32_t* other = keys;
    keys = spare;
    spare = other;
  }
}

// Returns the k-th largest score, 1 <= k <= count; keys and spare hold count + 16 elements.
static float kth_largest(const float* x, int64_t k, int64_t count, uint32_t* keys,
                         uint32_t* spare) {
  int64_t most = 4 * k > 1024 ? 4 * k : 1024;  // so that sorting costs little per element
  if (most > count) most = count;
  float floor = kNoScore;  // scores not above it change nothing
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t n = count - i < kLanes ? count - i : kLanes;
    uint32_t over = bits(and_(less(set1(floor), load_n(x + i, n)), lanes(0, n)));
    for (; over; over &= over - 1) keys[found++] = descending(x[i + __builtin_ctz(over)]);
    if (found > most) {
      radix_sort(keys, spare, found);
      found = k;
      floor = from_descending(keys[k - 1]);
    }
  }
  if (found < k) return kNoScore;
  radix_sort(keys, spare, found);
  return from_descending(keys[k - 1]);
}

// Writes the keys of scores of at least `floor`; returns their number.
static int64_t gather(const float* x, float floor, int64_t count, uint32_t* keys) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t n = count - i < kLanes ? count - i : kLanes;
    uint32_t under = bits(less(load_n(x + i, n), set1(floor)));
    for (uint32_t in = ~under & ((1u << n) - 1); in; in &= in - 1) {
      keys[found++] = descending(x[i + __builtin_ctz(in)]);
    }
  }
  return found;
}

// Returns the score of the last token of the nucleus among scores of at least `floor`. Sorts only
// the best scores, increasing their number until they hold the mass.
static float nucleus_floor(const float* x, float peak, float floor, double top_p, int64_t count,
                           uint32_t* keys, uint32_t* spare) {
  bool all = floor == kNoScore;
  double total = all ? sum_exp(x, peak, count) : 0.0;
  double log_total = noise_log(all ? total : 1.0);
  for (int bits = all ? 12 : 24;; bits += 4) {
    bool last = bits >= 24;
    float low = last ? floor : (float)((double)peak + log_total - bits * 0.6931471805599453);
    int64_t found = gather(x, low, count, keys);
    if (!last) {
      double mass = 0.0;
      for (int64_t i = 0; i < found; ++i) {
        mass += noise_exp((double)from_descending(keys[i]) - (double)peak);
      }
      if (!(mass >= top_p * total * (1 + 1e-9))) continue;  // too little mass, or infinite scores
    }
    radix_sort(keys, spare, found);
    if (!all) {
      for (int64_t i = 0; i < found; ++i) {
        total += noise_exp((double)from_descending(keys[i]) - (double)peak);
      }
    }
    double mass = 0.0;
    for (int64_t i = 0; i < found; ++i) {
      float value = from_descending(keys[i]);
      mass += noise_exp((double)value - (double)peak);
      if (mass >= top_p * total) return value;
    }
    return from_descending(keys[found - 1]);
  }
}

static int64_t filter_scratch(int64_t count) { return count + 2 * (count + kLanes); }

static float filter_floor(const float* scores, float temperature, const Filter& filter,
                          int64_t count, float* scratch) {
  float* x = scratch;
  uint32_t* keys = (uint32_t*)(scratch + count);
  uint32_t* spare = keys + count + kLanes;
  for (int64_t i = 0; i < count; ++i) x[i] = scores[i] / temperature;
  float peak = x[argmax(x, count)], floor = kNoScore;
  if (filter.top_k > 0 && filter.top_k < count) {
    floor = kth_largest(x, filter.top_k, count, keys, spare);
  }
  if (filter.top_p < 1) {
    float low = nucleus_floor(x, peak, floor, filter.top_p, count, keys, spare);
    floor = low > floor ? low : floor;
  }
  float low = peak + filter.log_min_p;
  floor = low > floor ? low : floor;
  return floor < peak ? floor : peak;
}

static float kth_score(const float* scores, int64_t k, int64_t count, float* scratch) {
  uint32_t* keys = (uint32_t*)scratch;
  return kth_largest(scores, k, count, keys, keys + count + kLanes);
}
