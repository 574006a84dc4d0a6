// Loads keys and values of the cache as floats, and stores them.

// Load 16 or n stored values as floats.
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

static I to_bf16(F x) {
  I b = as_int(x);
  I odd = and_(shift_right(b, 16), set1_i(1));
  I rounded = shift_right(add(b, add(odd, set1_i(0x7fff))), 16);
  return select(unordered(x), set1_i(0x7fc0), rounded);
}

// Clamps finite numbers to float16's range: an infinite key would make its row NaN.
static F within_f16(F x) {
  const F most = set1(65504.0f);
  const F cut = max(sub(zero(), most), min(most, x));
  return select(less(magnitude(x), set1(__builtin_inff())), cut, x);
}

// Writes 16 (or n) floats of a row to `to`, in the stored type.
static void narrow(const float* x, int64_t n, KvType type, float inverse, uint8_t* to) {
  F a = load_some(x, n);
  if (type == KvType::kF32) store((float*)to, a);
  if (type == KvType::kBf16) store_u16((uint16_t*)to, to_bf16(a));
  if (type == KvType::kF16) store_f16((uint16_t*)to, within_f16(a));
  if (type == KvType::kI8) store_i8((int8_t*)to, to_int(mul(a, set1(inverse))));
}

// Returns the largest magnitude of a head; NaN wins, because its bits are the largest.
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

// Writes one head of one token to elements `stride` apart.
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

// v is not read for a latent layer.
static void store_kv(const KvLayer& kv, int64_t slot, const float* k, const float* v) {
  int64_t size = kv_size(kv.type), head_bytes = kv.block_size * kv.head_dim * size;
  int64_t offset = slot % kv.block_size;
  uint8_t* block = kv.data + slot / kv.block_size * kv.block_bytes;
  float* scales = (float*)(block + kv.vectors() / kv.block_size * head_bytes) + offset;
  if (kv.latent) {
    for (int64_t head = 0; head < kv.kv_heads; ++head, k += kv.head_dim) {
      store_head(kv, k, block + head * head_bytes + offset * kv.head_dim * size, 1,
                 scales + head * kv.block_size);
    }
    return;
  }
  for (int64_t head = 0; head < kv.kv_heads; ++head, k += kv.head_dim, v += kv.head_dim) {
    int64_t value_head = kv.kv_heads + head;
    store_head(kv, k, block + head * head_bytes + offset * size, kv.block_size,
               scales + head * kv.block_size);
    store_head(kv, v, block + value_head * head_bytes + offset * kv.head_dim * size, 1,
               scales + value_head * kv.block_size);
  }
}
