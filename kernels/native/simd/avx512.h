// The vector vocabulary on AVX-512 (F, BW, DQ, VL, VNNI, BF16). Included inside the target's
// namespace; see simd/README.md for what each word means. All other simd/*.h have the same words.
#pragma once

struct F { __m512 v; };     // 16 floats
struct I { __m512i v; };    // 16 int32
struct B { __m512i v; };    // 64 bytes
struct M { __mmask16 v; };  // one bit per lane

static constexpr int kRegisters = 32;  // how many F or I the vector registers hold

PDS_INLINE __mmask16 first_lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }

PDS_INLINE F zero() { return {_mm512_setzero_ps()}; }
PDS_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
PDS_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
PDS_INLINE F load_n(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
PDS_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
PDS_INLINE void store_n(float* p, F a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
PDS_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
PDS_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
PDS_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
PDS_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
PDS_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PDS_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
PDS_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }

PDS_INLINE F load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
PDS_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
PDS_INLINE F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
PDS_INLINE F load_f16_n(const uint16_t* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
PDS_INLINE F load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
PDS_INLINE F load_i8_n(const int8_t* p, int64_t n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
}

// Converts by way of a float16 with the same sign, exponent and mantissa fields; the exponent bias
// is then too high by 8.
PDS_INLINE F load_e4m3(const uint8_t* p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  wide = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBFFF));
  return {_mm512_cvtph_ps(wide)};
}

PDS_INLINE I set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
PDS_INLINE I load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
PDS_INLINE void store_i(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
PDS_INLINE I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
PDS_INLINE I sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PDS_INLINE I and_(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
PDS_INLINE I or_(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
PDS_INLINE I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
PDS_INLINE I shift_left(I a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
PDS_INLINE I shift_right(I a, int n) { return {_mm512_srli_epi32(a.v, n)}; }
PDS_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
PDS_INLINE I to_int(F a) {
  return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
PDS_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
PDS_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
PDS_INLINE void store_i8(int8_t* p, I a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v));
}
PDS_INLINE void store_u16(uint16_t* p, I a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v));
}
PDS_INLINE void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

PDS_INLINE M less(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PDS_INLINE M less(I a, I b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PDS_INLINE M unordered(F a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
PDS_INLINE M lanes(int64_t from, int64_t to) {
  return {(__mmask16)(first_lanes(to) & ~first_lanes(from))};
}
PDS_INLINE M and_(M a, M b) { return {(__mmask16)(a.v & b.v)}; }
PDS_INLINE bool any(M a) { return a.v != 0; }
PDS_INLINE uint32_t bits(M a) { return a.v; }
PDS_INLINE F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
PDS_INLINE I select(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }

PDS_INLINE B load_b(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PDS_INLINE void store_b(uint8_t* p, B a) { _mm512_storeu_si512(p, a.v); }
PDS_INLINE B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
PDS_INLINE B high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
PDS_INLINE B lookup(B numbers, const uint8_t* table) {
  __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(wide, numbers.v)};
}
PDS_INLINE B with_fifth(B nibbles, B fifths, int k) {
  __m512i there = k < 4 ? _mm512_slli_epi16(fifths.v, 4 - k) : _mm512_srli_epi16(fifths.v, k - 4);
  // nibbles | (there & 16)
  return {_mm512_ternarylogic_epi32(nibbles.v, there, _mm512_set1_epi8(16), 0xF8)};
}
PDS_INLINE B with_third(B pairs, B thirds, int k) {
  __m512i there = k < 2 ? _mm512_slli_epi16(thirds.v, 2 - k) : _mm512_srli_epi16(thirds.v, k - 2);
  return {_mm512_ternarylogic_epi32(pairs.v, there, _mm512_set1_epi8(4), 0xF8)};
}
PDS_INLINE B pairs(B fields, int k) {
  return {_mm512_and_si512(_mm512_srli_epi16(fields.v, 2 * k), _mm512_set1_epi8(3))};
}
PDS_INLINE B with_pair(B nibbles, B fields, int k) {
  __m512i there = k < 2 ? _mm512_slli_epi16(fields.v, 4 - 2 * k)
                        : _mm512_srli_epi16(fields.v, 2 * k - 4);
  return {_mm512_ternarylogic_epi32(nibbles.v, there, _mm512_set1_epi8(48), 0xF8)};
}
PDS_INLINE I dot(I acc, B w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}
PDS_INLINE I dot_small(I acc, B w, const int8_t* x) { return dot(acc, w, x); }
PDS_INLINE F dot_bf16(F acc, B w, const uint16_t* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, 4);
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(pair))};
}

PDS_INLINE float reduce_add(F a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
PDS_INLINE float reduce_max(F a) {
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
// Not _mm512_reduce_add_epi32: its last addition is in C++, where overflow is undefined.
PDS_INLINE int32_t reduce_add(I a) {
  __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_unpackhi_epi64(q, q));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 1)));
}
PDS_INLINE int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a.v); }
