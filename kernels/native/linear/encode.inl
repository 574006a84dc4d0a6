// Encodes activations for products.

// Blocks smaller than this (2^-100) count as zero: 127 / amax must be finite.
static constexpr int32_t kTinyBits = (127 - 100) << 23;

static void encode_block(const float* x, Int8Block* out) {
  const I magnitude = set1_i(0x7FFFFFFF);
  F low = load(x), high = load(x + 16);
  // Compared as integers, a NaN is larger than everything else.
  int32_t amax_bits = reduce_max(max(and_(as_int(low), magnitude), and_(as_int(high), magnitude)));
  float amax, factor = 0;
  __builtin_memcpy(&amax, &amax_bits, 4);
  if (amax_bits < kTinyBits) {
    amax = 0;
  } else {
    factor = 127.0f / amax;
  }
  // Infinity times a factor of 0, and NaN, become INT32_MIN, which a sum must not contain.
  const I least = set1_i(-128);
  I a = max(to_int(mul(low, set1(factor))), least);
  I b = max(to_int(mul(high, set1(factor))), least);
  store_i8(out->q, a);
  store_i8(out->q + 16, b);
  int32_t half = reduce_add(a), sum = half + reduce_add(b);
  out->scale = amax / 127.0f;
  out->scaled_sum = out->scale * (float)sum;
  out->minus_sum = -sum;
  out->minus_half = -half;
}

static uint16_t to_bf16(float x) {
  uint32_t word;
  __builtin_memcpy(&word, &x, 4);
  if ((word & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(word >> 16 | 0x40);  // a quiet NaN
  return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

static void encode_bf16(const float* x, int64_t cols, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    F value = load(x + i);
    I word = as_int(value), odd = and_(shift_right(word, 16), set1_i(1));
    I rounded = add(add(word, set1_i(0x7FFF)), odd);
    I quiet = or_(word, set1_i(0x400000));
    store_u16(out + i, shift_right(select(unordered(value), quiet, rounded), 16));
  }
  for (; i < cols; ++i) out[i] = to_bf16(x[i]);
  if (cols % 2) out[cols] = 0;
}

static void encode(const Activations& x, int64_t begin, int64_t end) {
  const int64_t blocks = x.cols / 32, wide = x.cols + x.cols % 2;
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x.f32 + row * x.cols;
    if (x.needs & kInt8) {
      for (int64_t b = 0; b < blocks; ++b) encode_block(in + 32 * b, x.int8 + row * blocks + b);
    }
    if (x.needs & kBf16) encode_bf16(in, x.cols, x.bf16 + row * wide);
  }
}
