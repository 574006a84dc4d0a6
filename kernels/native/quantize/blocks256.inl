// Blocks of 256 values in groups whose scales (and minima) are themselves quantized: the K formats.
//
// Each group's scale is searched: several steps near the one that follows from the group's range
// are tried, and for the levels of each, the scale (and minimum) of least squared error is
// computed. With minima, errors of larger values count more; without minima, that made models
// worse. Then the scales of all groups are rounded to the best of the nearby values, and the levels
// are recomputed for the rounded scales.

constexpr int kValues = 256;

// Rounds to the nearest integer, ties to even: after the addition, a float has no fraction bits.
inline float rounded_level(float x, int least, int most) {
  constexpr float kNoFraction = 12582912;  // 1.5 * 2^23
  const float within = std::min(std::max(x, static_cast<float>(least)), static_cast<float>(most));
  return within + kNoFraction - kNoFraction;
}

inline int level(float x, int least, int most) {
  return static_cast<int>(rounded_level(x, least, most));
}

// Computes the weight of each value's error.
template <int Size>
void weigh(const float* x, float* weight) {
  float squares = 0;
  for (int i = 0; i < Size; ++i) squares += x[i] * x[i];
  const float mean = std::sqrt(squares / Size);
  for (int i = 0; i < Size; ++i) weight[i] = mean + std::fabs(x[i]);
}

constexpr int kRefinements = 4;  // of the best step: levels for its line, a line for the levels

// Returns the best d for values d * level with levels from -half to half - 1.
template <int Size>
float fit_scale(const float* x, int half) {
  const float top = largest(x, Size);
  if (inverse(top) == 0) return 0;
  float best = 0, best_d = 0;
  const auto tried = [&](float id) {  // returns whether it is better
    float xq = 0, qq = 0;
    for (int i = 0; i < Size; ++i) {
      const float q = rounded_level(x[i] * id, -half, half - 1);
      xq += x[i] * q;
      qq += q * q;
    }
    if (!(qq > 0 && xq * xq > best * qq)) return false;
    best = xq * xq / qq;  // the reduction of the squared error
    best_d = xq / qq;
    return true;
  };
  for (int step = -9; step <= 9; ++step) {
    tried(-(static_cast<float>(half) + 0.1f * static_cast<float>(step)) / top);
  }
  for (int n = 0; n < kRefinements && tried(inverse(best_d)); ++n) {}
  return best_d;
}

struct Line {
  float d, minimum;  // values are d * level - minimum; neither is negative
};

// Levels are from 0 to top; tries `steps` steps, starting at (top - below) / range.
template <int Size>
Line fit_line(const float* x, const float* weight, int top, float below, int steps) {
  const auto [low, high] = std::minmax_element(x, x + Size);
  const float least = std::min(*low, 0.0f), range = *high - least;
  if (inverse(range) == 0) return {0, -least};
  float sum_w = 0, sum_x = 0;
  for (int i = 0; i < Size; ++i) {
    sum_w += weight[i];
    sum_x += weight[i] * x[i];
  }
  Line best{range / static_cast<float>(top), -least};
  float best_error = INFINITY;
  const auto tried = [&](float id, float minimum) {  // returns whether it is better
    // Levels are relative to the first one, so that sums over equal levels are exactly 0.
    float q[Size], sum_q = 0, sum_qq = 0, sum_xq = 0;
    for (int i = 0; i < Size; ++i) q[i] = rounded_level((x[i] + minimum) * id, 0, top);
    const float first = q[0];
    for (int i = 0; i < Size; ++i) {
      const float from_first = q[i] - first;
      sum_q += weight[i] * from_first;
      sum_qq += weight[i] * from_first * from_first;
      sum_xq += weight[i] * x[i] * from_first;
    }
    Line line{1 / id, minimum};
    const float spread = sum_w * sum_qq - sum_q * sum_q;
    if (spread > 0) {
      line.d = (sum_w * sum_xq - sum_x * sum_q) / spread;
      line.minimum = (sum_q * sum_xq - sum_qq * sum_x) / spread + line.d * first;
    }
    if (line.minimum < 0 || line.d < 0) {  // a line through 0
      const float xq = sum_xq + first * sum_x;
      const float qq = sum_qq + first * (2 * sum_q + first * sum_w);
      line = {qq > 0 ? std::max(0.0f, xq / qq) : 0, 0};
    }
    float error = 0;
    for (int i = 0; i < Size; ++i) {
      const float off = line.d * q[i] - line.minimum - x[i];
      error += weight[i] * off * off;
    }
    if (!(error < best_error)) return false;
    best_error = error;
    best = line;
    return true;
  };
  tried(static_cast<float>(top) / range, -least);
  for (int step = 0; step < steps; ++step) {
    tried((static_cast<float>(top) - below + 0.1f * static_cast<float>(step)) / range, -least);
  }
  for (int n = 0; n < kRefinements && inverse(best.d) != 0; ++n) {
    if (!tried(inverse(best.d), best.minimum)) break;
  }
  return best;
}

// Rounded scales and minima of all groups, scale[g] * d and minimum[g] * m: the best of the nearest
// values and their neighbours.
template <int Groups>
struct Lines {
  static constexpr int kSize = kValues / Groups;
  int scale[Groups] = {}, minimum[Groups] = {};
  float d, m;  // as float16 has them

  // weight: one per value; scales and minima are from 0 to most, levels from 0 to top.
  Lines(const float* x, const float* weight, const Line (&lines)[Groups], int most, int top,
        uint8_t* d_at, uint8_t* m_at) {
    float most_d = 0, most_m = 0;
    for (const Line& line : lines) {
      most_d = std::max(most_d, line.d);
      most_m = std::max(most_m, line.minimum);
    }
    d = put_half(most_d / static_cast<float>(most), d_at);
    m = put_half(most_m / static_cast<float>(most), m_at);
    for (int g = 0; g < Groups; ++g) {
      const int near_d = level(lines[g].d * inverse(d), 0, most);
      const int near_m = level(lines[g].minimum * inverse(m), 0, most);
      float least = INFINITY;
      for (int s = std::max(0, near_d - 1); s <= std::min(most, near_d + 1); ++s) {
        for (int n = std::max(0, near_m - 1); n <= std::min(most, near_m + 1); ++n) {
          const float off = error(x + g * kSize, weight + g * kSize, d * static_cast<float>(s),
                                  m * static_cast<float>(n), top);
          if (!(off < least)) continue;
          least = off;
          scale[g] = s;
          minimum[g] = n;
        }
      }
    }
  }

  static float error(const float* x, const float* weight, float step, float low, int top) {
    const float id = inverse(step);
    float sum = 0;
    for (int i = 0; i < kSize; ++i) {
      const float off = step * rounded_level((x[i] + low) * id, 0, top) - low - x[i];
      sum += weight[i] * off * off;
    }
    return sum;
  }

  int level_of(float x, int g, int top) const {
    const float step = d * static_cast<float>(scale[g]);
    return level((x + m * static_cast<float>(minimum[g])) * inverse(step), 0, top);
  }
};

// Writes fields of `width` bits: `at_once` bytes hold the levels of 8 / width runs of that length.
inline void write_fields(const int* levels, int width, int at_once, int bytes, uint8_t* out) {
  const int per_byte = 8 / width;
  for (int byte = 0; byte < bytes; ++byte) {
    const int run = byte / at_once, at = byte % at_once;
    int packed = 0;
    for (int field = 0; field < per_byte; ++field) {
      const int value = levels[(run * per_byte + field) * at_once + at] & ((1 << width) - 1);
      packed |= value << (field * width);
    }
    out[byte] = static_cast<uint8_t>(packed);
  }
}

void write_q2_k(const float* x, uint8_t* block) {
  Line lines[16];
  float weight[kValues];
  for (int i = 0; i < kValues; ++i) weight[i] = std::fabs(x[i]);
  for (int g = 0; g < 16; ++g) {
    lines[g] = fit_line<16>(x + 16 * g, weight + 16 * g, 3, 0.5f, 16);
  }
  const Lines<16> rounded(x, weight, lines, 15, 3, block + 80, block + 82);
  for (int g = 0; g < 16; ++g) {
    block[g] = static_cast<uint8_t>(rounded.scale[g] | rounded.minimum[g] << 4);
  }
  int levels[kValues];
  for (int i = 0; i < kValues; ++i) levels[i] = rounded.level_of(x[i], i / 16, 3);
  write_fields(levels, 2, 32, 64, block + 16);
}

// Four and five bits: groups of 32 values, 6-bit scales and minima in twelve bytes.
template <int Bits>
void write_q45_k(const float* x, uint8_t* block) {
  constexpr int kTop = (1 << Bits) - 1;
  Line lines[8];
  float weight[kValues];
  for (int g = 0; g < 8; ++g) {
    weigh<32>(x + 32 * g, weight + 32 * g);
    lines[g] = fit_line<32>(x + 32 * g, weight + 32 * g, kTop, Bits == 4 ? 1.0f : 0.5f,
                            Bits == 4 ? 21 : 16);
  }
  const Lines<8> rounded(x, weight, lines, 63, kTop, block, block + 2);
  uint8_t* packed = block + 4;
  for (int g = 0; g < 4; ++g) {
    const int scale = rounded.scale[g + 4], minimum = rounded.minimum[g + 4];
    packed[g] = static_cast<uint8_t>(rounded.scale[g] | (scale >> 4) << 6);
    packed[g + 4] = static_cast<uint8_t>(rounded.minimum[g] | (minimum >> 4) << 6);
    packed[g + 8] = static_cast<uint8_t>((scale & 15) | (minimum & 15) << 4);
  }
  int levels[kValues];
  for (int i = 0; i < kValues; ++i) levels[i] = rounded.level_of(x[i], i / 32, kTop);
  if (Bits == 4) {
    write_fields(levels, 4, 32, 128, block + 16);
    return;
  }
  write_fields(levels, 4, 32, 128, block + 48);
  for (int& one : levels) one >>= 4;
  write_fields(levels, 1, 32, 32, block + 16);
}

// Rounded scales of 16 groups of 16 values without minima, scale[g] * d: the best of the nearest
// value and its neighbours.
struct Scales16 {
  int scale[16] = {};
  float d;  // as float16 has it

  Scales16(const float* x, int half, int most, uint8_t* d_at) {
    float found[16];
    for (int g = 0; g < 16; ++g) found[g] = fit_scale<16>(x + 16 * g, half);
    d = put_half(largest(found, 16) / static_cast<float>(-most), d_at);
    for (int g = 0; g < 16; ++g) {
      const int near = level(found[g] * inverse(d), -most, most - 1);
      float least = INFINITY;
      for (int s = std::max(-most, near - 1); s <= std::min(most - 1, near + 1); ++s) {
        const float off = error(x + 16 * g, d * static_cast<float>(s), half);
        if (!(off < least)) continue;
        least = off;
        scale[g] = s;
      }
    }
  }

  static float error(const float* x, float step, int half) {
    const float id = inverse(step);
    float sum = 0;
    for (int i = 0; i < 16; ++i) {
      const float off = step * rounded_level(x[i] * id, -half, half - 1) - x[i];
      sum += off * off;
    }
    return sum;
  }

  int level_of(float x, int g, int half) const {  // from 0
    const float step = d * static_cast<float>(scale[g]);
    return level(x * inverse(step), -half, half - 1) + half;
  }
};

void write_q3_k(const float* x, uint8_t* block) {
  const Scales16 rounded(x, 4, 32, block + 108);
  int levels[kValues], scales[16];
  for (int i = 0; i < kValues; ++i) levels[i] = rounded.level_of(x[i], i / 16, 4);
  write_fields(levels, 2, 32, 64, block + 32);
  for (int& one : levels) one >>= 2;
  write_fields(levels, 1, 32, 32, block);
  for (int g = 0; g < 16; ++g) scales[g] = rounded.scale[g] + 32;
  write_fields(scales, 4, 8, 8, block + 96);
  for (int& one : scales) one >>= 4;
  write_fields(scales, 2, 4, 4, block + 104);
}

void write_q6_k(const float* x, uint8_t* block) {
  const Scales16 rounded(x, 32, 128, block + 208);
  int levels[kValues];
  for (int i = 0; i < kValues; ++i) levels[i] = rounded.level_of(x[i], i / 16, 32);
  write_fields(levels, 4, 64, 128, block);
  for (int& one : levels) one >>= 4;
  write_fields(levels, 2, 32, 64, block + 128);
  for (int g = 0; g < 16; ++g) {
    block[192 + g] = static_cast<uint8_t>(static_cast<int8_t>(rounded.scale[g]));
  }
}
