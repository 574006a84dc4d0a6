// The vector vocabulary on AVX2, FMA and F16C: a vector is two halves. Included inside the target's
// namespace; see simd/README.md for what each word means.
#pragma once

struct F { __m256 a, b; };   // lanes 0 to 7, 8 to 15
struct I { __m256i a, b; };  // the same
struct B { __m256i a, b; };  // bytes 0 to 31, 32 to 63
struct M { __m256i a, b; };  // all bits of a lane, or none

static constexpr int kRegisters = 8;  // how many F or I the vector registers hold

// Half `half` of the lanes [0, n).
PDS_INLINE __m256i first_lanes(int64_t n, int half) {
  __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                  _mm256_set1_epi32(8 * half));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}

PDS_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PDS_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PDS_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PDS_INLINE F load_n(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, first_lanes(n, 0)), _mm256_maskload_ps(p + 8, first_lanes(n, 1))};
}
PDS_INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PDS_INLINE void store_n(float* p, F x, int64_t n) {
  _mm256_maskstore_ps(p, first_lanes(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, first_lanes(n, 1), x.b);
}
PDS_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PDS_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PDS_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PDS_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PDS_INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PDS_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PDS_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }

// Loads 8 numbers of 16 bits; widens them as the upper halves of floats, or as float16.
PDS_INLINE __m128i load_128(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
PDS_INLINE __m256 from_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
PDS_INLINE F load_bf16(const uint16_t* p) {
  return {from_bf16(load_128(p)), from_bf16(load_128(p + 8))};
}
PDS_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))};
}
PDS_INLINE F load_i8(const int8_t* p) {
  __m128i x = load_128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))};
}
// As float16; see avx512.h.
PDS_INLINE F load_e4m3(const uint8_t* p) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_128(p)), 7);
  wide = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xBFFF));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(wide)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1))};
}
// AVX2 has no masked loads below 32 bits, so tails go through the stack.
PDS_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  uint16_t t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load_bf16(t);
}
PDS_INLINE F load_f16_n(const uint16_t* p, int64_t n) {
  uint16_t t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load_f16(t);
}
PDS_INLINE F load_i8_n(const int8_t* p, int64_t n) {
  int8_t t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load_i8(t);
}

PDS_INLINE I set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PDS_INLINE I load_i(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
PDS_INLINE void store_i(int32_t* p, I x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
PDS_INLINE I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PDS_INLINE I sub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
PDS_INLINE I and_(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
PDS_INLINE I or_(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
PDS_INLINE I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
PDS_INLINE I shift_left(I x, int n) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
PDS_INLINE I shift_right(I x, int n) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
PDS_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PDS_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
PDS_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PDS_INLINE I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
// Packing works on 128-bit lanes; the permutation restores the order of the middle ones.
PDS_INLINE void store_i8(int8_t* p, I x) {
  __m256i wide = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
PDS_INLINE void store_u16(uint16_t* p, I x) {
  __m256i low = _mm256_set1_epi32(0xFFFF);
  __m256i both = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xD8));
}
PDS_INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

PDS_INLINE M less(F x, F y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
PDS_INLINE M less(I x, I y) {
  return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)};
}
PDS_INLINE M unordered(F x) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
PDS_INLINE M lanes(int64_t from, int64_t to) {
  return {_mm256_andnot_si256(first_lanes(from, 0), first_lanes(to, 0)),
          _mm256_andnot_si256(first_lanes(from, 1), first_lanes(to, 1))};
}
PDS_INLINE M and_(M x, M y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
PDS_INLINE uint32_t bits(M m) {
  return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(m.a)) |
         (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(m.b)) << 8;
}
PDS_INLINE bool any(M m) {
  __m256i either = _mm256_or_si256(m.a, m.b);
  return !_mm256_testz_si256(either, either);
}
PDS_INLINE F select(M m, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(m.a)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(m.b))};
}
PDS_INLINE I select(M m, I yes, I no) {
  return {_mm256_blendv_epi8(no.a, yes.a, m.a), _mm256_blendv_epi8(no.b, yes.b, m.b)};
}

PDS_INLINE B load_b(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
PDS_INLINE void store_b(uint8_t* p, B x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
PDS_INLINE B low_nibbles(B x) {
  __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
PDS_INLINE B high_nibbles(B x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
PDS_INLINE B lookup(B numbers, const uint8_t* table) {
  __m256i wide = _mm256_broadcastsi128_si256(load_128(table));
  return {_mm256_shuffle_epi8(wide, numbers.a), _mm256_shuffle_epi8(wide, numbers.b)};
}
PDS_INLINE __m256i with_fifth(__m256i nibbles, __m256i fifths, int k) {
  __m256i there = k < 4 ? _mm256_slli_epi16(fifths, 4 - k) : _mm256_srli_epi16(fifths, k - 4);
  return _mm256_or_si256(nibbles, _mm256_and_si256(there, _mm256_set1_epi8(16)));
}
PDS_INLINE B with_fifth(B nibbles, B fifths, int k) {
  return {with_fifth(nibbles.a, fifths.a, k), with_fifth(nibbles.b, fifths.b, k)};
}
PDS_INLINE __m256i shifted(__m256i x, int left, int mask) {
  x = left < 0 ? _mm256_srli_epi16(x, -left) : _mm256_slli_epi16(x, left);
  return _mm256_and_si256(x, _mm256_set1_epi8((char)mask));
}
PDS_INLINE B or_shifted(B x, B y, int left, int mask) {
  return {_mm256_or_si256(x.a, shifted(y.a, left, mask)),
          _mm256_or_si256(x.b, shifted(y.b, left, mask))};
}
PDS_INLINE B with_third(B pairs, B thirds, int k) { return or_shifted(pairs, thirds, 2 - k, 4); }
PDS_INLINE B pairs(B fields, int k) {
  return {shifted(fields.a, -2 * k, 3), shifted(fields.b, -2 * k, 3)};
}
PDS_INLINE B with_pair(B nibbles, B fields, int k) {
  return or_shifted(nibbles, fields, 4 - 2 * k, 48);
}
// maddubs would saturate the sum of two large products, so even and odd bytes are widened
// separately.
PDS_INLINE I dot(I acc, B w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  __m256i xs = _mm256_set1_epi32(four), low = _mm256_set1_epi16(255);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8), odd = _mm256_srai_epi16(xs, 8);
  __m256i a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_and_si256(w.a, low), even));
  __m256i b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_and_si256(w.b, low), even));
  return {_mm256_add_epi32(a, _mm256_madd_epi16(_mm256_srli_epi16(w.a, 8), odd)),
          _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_srli_epi16(w.b, 8), odd))};
}
PDS_INLINE I dot_small(I acc, B w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  __m256i xs = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1);
  __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, xs), one);
  __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, xs), one);
  return {_mm256_add_epi32(acc.a, a), _mm256_add_epi32(acc.b, b)};
}
PDS_INLINE F dot_bf16(F acc, B w, const uint16_t* x) {
  B high = {_mm256_set1_epi32((int)0xFFFF0000), _mm256_set1_epi32((int)0xFFFF0000)};
  F even = {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
  F odd = {_mm256_castsi256_ps(_mm256_and_si256(w.a, high.a)),
           _mm256_castsi256_ps(_mm256_and_si256(w.b, high.b))};
  acc = fma(even, as_float(set1_i((int32_t)((uint32_t)x[0] << 16))), acc);
  return fma(odd, as_float(set1_i((int32_t)((uint32_t)x[1] << 16))), acc);
}

PDS_INLINE float reduce_add(F x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
PDS_INLINE float reduce_max(F x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
PDS_INLINE int32_t reduce_add(I x) {
  __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_unpackhi_epi64(q, q));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 1)));
}
PDS_INLINE int32_t reduce_max(I x) {
  __m256i h = _mm256_max_epi32(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_unpackhi_epi64(q, q));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 1)));
}
