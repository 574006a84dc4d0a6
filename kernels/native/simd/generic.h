// The vector vocabulary in plain C++ (with the vector types of GCC and Clang), for any machine: a
// vector is four quarters of 128 bits, which is what SSE2 and NEON have. Included inside the
// target's namespace; see simd/README.md for what each word means.
#pragma once

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint16_t Half8 __attribute__((vector_size(16)));
typedef uint8_t Byte16 __attribute__((vector_size(16)));

struct F { Float4 v[4]; };  // lanes 0 to 3, 4 to 7, ...
struct I { Int4 v[4]; };
struct B { Byte16 v[4]; };
struct M { Int4 v[4]; };    // all bits of a lane, or none

// How many F or I the vector registers hold.
#if defined(__aarch64__)
static constexpr int kRegisters = 8;
#else
static constexpr int kRegisters = 4;
#endif

#define PDS_QUARTERS for (int i = 0; i < 4; ++i)

PDS_INLINE F set1(float x) {
  Float4 all = {x, x, x, x};
  return {{all, all, all, all}};
}
PDS_INLINE F zero() { return set1(0); }
PDS_INLINE F load(const float* p) {
  F r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
PDS_INLINE F load_n(const float* p, int64_t n) {
  float t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
PDS_INLINE void store(float* p, F a) { __builtin_memcpy(p, &a, 64); }
PDS_INLINE void store_n(float* p, F a, int64_t n) {
  float t[16];
  store(t, a);
  for (int64_t i = 0; i < n; ++i) p[i] = t[i];
}
PDS_INLINE F add(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] + b.v[i]; return a; }
PDS_INLINE F sub(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] - b.v[i]; return a; }
PDS_INLINE F mul(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] * b.v[i]; return a; }
PDS_INLINE F div(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] / b.v[i]; return a; }
PDS_INLINE F fma(F a, F b, F c) {
  PDS_QUARTERS {
    c.v[i] = Float4{__builtin_fmaf(a.v[i][0], b.v[i][0], c.v[i][0]),
                    __builtin_fmaf(a.v[i][1], b.v[i][1], c.v[i][1]),
                    __builtin_fmaf(a.v[i][2], b.v[i][2], c.v[i][2]),
                    __builtin_fmaf(a.v[i][3], b.v[i][3], c.v[i][3])};
  }
  return c;
}
PDS_INLINE F min(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
PDS_INLINE F max(F a, F b) { PDS_QUARTERS a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }

PDS_INLINE I set1_i(int32_t x) {
  Int4 all = {x, x, x, x};
  return {{all, all, all, all}};
}
PDS_INLINE I load_i(const int32_t* p) {
  I r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
PDS_INLINE void store_i(int32_t* p, I a) { __builtin_memcpy(p, &a, 64); }
// Computes on unsigned integers, so that overflow wraps as in vector registers.
PDS_INLINE I add(I a, I b) {
  PDS_QUARTERS a.v[i] = (Int4)((Word4)a.v[i] + (Word4)b.v[i]);
  return a;
}
PDS_INLINE I sub(I a, I b) {
  PDS_QUARTERS a.v[i] = (Int4)((Word4)a.v[i] - (Word4)b.v[i]);
  return a;
}
PDS_INLINE I and_(I a, I b) { PDS_QUARTERS a.v[i] = a.v[i] & b.v[i]; return a; }
PDS_INLINE I or_(I a, I b) { PDS_QUARTERS a.v[i] = a.v[i] | b.v[i]; return a; }
PDS_INLINE I max(I a, I b) { PDS_QUARTERS a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
PDS_INLINE I shift_left(I a, int n) { PDS_QUARTERS a.v[i] = (Int4)((Word4)a.v[i] << n); return a; }
PDS_INLINE I shift_right(I a, int n) { PDS_QUARTERS a.v[i] = (Int4)((Word4)a.v[i] >> n); return a; }
PDS_INLINE F as_float(I a) {
  F r;
  __builtin_memcpy(&r, &a, 64);
  return r;
}
PDS_INLINE I as_int(F a) {
  I r;
  __builtin_memcpy(&r, &a, 64);
  return r;
}
PDS_INLINE F to_float(I a) {
  F r;
  PDS_QUARTERS r.v[i] = __builtin_convertvector(a.v[i], Float4);
  return r;
}

PDS_INLINE M less(F a, F b) {
  M r;
  PDS_QUARTERS r.v[i] = a.v[i] < b.v[i];
  return r;
}
PDS_INLINE M less(I a, I b) {
  M r;
  PDS_QUARTERS r.v[i] = a.v[i] < b.v[i];
  return r;
}
PDS_INLINE M unordered(F a) {
  M r;
  PDS_QUARTERS r.v[i] = a.v[i] != a.v[i];
  return r;
}
PDS_INLINE M and_(M a, M b) { PDS_QUARTERS a.v[i] = a.v[i] & b.v[i]; return a; }
PDS_INLINE M lanes(int64_t from, int64_t to) {
  I lane = {{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}};
  return and_(less(set1_i((int32_t)from - 1), lane), less(lane, set1_i((int32_t)to)));
}
PDS_INLINE uint32_t bits(M a) {
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= (uint32_t)(a.v[i / 4][i % 4] & 1) << i;
  return r;
}
PDS_INLINE bool any(M a) {
  Int4 r = a.v[0] | a.v[1] | a.v[2] | a.v[3];
  return (r[0] | r[1] | r[2] | r[3]) != 0;
}
PDS_INLINE I select(M m, I yes, I no) {
  PDS_QUARTERS no.v[i] = (yes.v[i] & m.v[i]) | (no.v[i] & ~m.v[i]);
  return no;
}
PDS_INLINE F select(M m, F yes, F no) { return as_float(select(m, as_int(yes), as_int(no))); }

PDS_INLINE I to_int(F a) {
  const F whole = set1(8388608.0f);  // 2^23: from here floats are integers
  I sign = and_(as_int(a), set1_i(INT32_MIN));
  F size = as_float(and_(as_int(a), set1_i(INT32_MAX)));
  F near = as_float(or_(as_int(sub(add(size, whole), whole)), sign));  // the sum rounds to even
  near = select(less(size, whole), near, a);
  M fits = less(size, set1(2147483648.0f));  // false for NaN; -2^31 may count as not fitting
  near = select(fits, near, zero());
  I r;
  PDS_QUARTERS r.v[i] = __builtin_convertvector(near.v[i], Int4);
  return select(fits, r, set1_i(INT32_MIN));
}

// Loads 16 numbers of 16 bits and widens them.
PDS_INLINE I load_u16(const uint16_t* p) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = p[i];
  return r;
}
PDS_INLINE void store_u16(uint16_t* p, I a) {
  for (int i = 0; i < 16; ++i) p[i] = (uint16_t)a.v[i / 4][i % 4];
}
PDS_INLINE void store_i8(int8_t* p, I a) {
  for (int i = 0; i < 16; ++i) {
    int32_t x = a.v[i / 4][i % 4];
    p[i] = (int8_t)(x < -128 ? -128 : x > 127 ? 127 : x);
  }
}
PDS_INLINE F load_bf16(const uint16_t* p) { return as_float(shift_left(load_u16(p), 16)); }
PDS_INLINE F load_i8(const int8_t* p) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = p[i];
  return to_float(r);
}
// Converts float16 with integer operations, like F16C: subnormals are kept; a NaN becomes quiet and
// keeps its payload.
PDS_INLINE F load_f16(const uint16_t* p) {
  I h = load_u16(p);
  I sign = shift_left(and_(h, set1_i(0x8000)), 16);
  I size = shift_left(and_(h, set1_i(0x7FFF)), 13);
  const I smallest = set1_i(113 << 23);  // 2^-14, the smallest normal float16
  I normal = add(size, set1_i(112 << 23));
  I tiny = as_int(sub(as_float(add(size, smallest)), as_float(smallest)));
  I special = or_(size, set1_i(0x7F800000));
  special = select(less(set1_i(0x7F800000), special), or_(special, set1_i(0x400000)), special);
  I r = select(less(size, set1_i(0x400 << 13)), tiny, normal);
  r = select(less(size, set1_i(0x7C00 << 13)), r, special);
  return as_float(or_(r, sign));
}
PDS_INLINE void store_f16(uint16_t* p, F a) {
  I sign = and_(shift_right(as_int(a), 16), set1_i(0x8000));
  I size = and_(as_int(a), set1_i(INT32_MAX));
  // Rounds to nearest even: adds half of the last place, less one if the place is even.
  I odd = and_(shift_right(size, 13), set1_i(1));
  I normal = shift_right(add(add(size, set1_i(0xFFF - (112 << 23))), odd), 13);
  // Adds a float whose last place is 2^-24, so that the addition rounds.
  const F half = set1(0.5f);
  I tiny = sub(as_int(add(as_float(size), half)), as_int(half));
  I nan = or_(and_(shift_right(size, 13), set1_i(0x3FF)), set1_i(0x7E00));
  I r = select(less(size, set1_i(113 << 23)), tiny, normal);
  r = select(less(size, set1_i(143 << 23)), r, set1_i(0x7C00));  // from 2^16: infinity
  r = select(less(set1_i(0x7F800000), size), nan, r);
  store_u16(p, or_(r, sign));
}
PDS_INLINE F load_bf16_n(const uint16_t* p, int64_t n) {
  uint16_t t[16] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = p[i];
  return load_bf16(t);
}
PDS_INLINE F load_e4m3(const uint8_t* p) {  // as float16; see avx512.h
  uint16_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7);
  return load_f16(t);
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

PDS_INLINE B load_b(const uint8_t* p) {
  B r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
PDS_INLINE void store_b(uint8_t* p, B a) { __builtin_memcpy(p, &a, 64); }
PDS_INLINE B low_nibbles(B a) { PDS_QUARTERS a.v[i] = a.v[i] & 15; return a; }
PDS_INLINE B high_nibbles(B a) { PDS_QUARTERS a.v[i] = a.v[i] >> 4; return a; }
PDS_INLINE B lookup(B numbers, const uint8_t* table) {
  B r;
  for (int i = 0; i < 64; ++i) r.v[i / 16][i % 16] = table[numbers.v[i / 16][i % 16]];
  return r;
}
PDS_INLINE B with_fifth(B nibbles, B fifths, int k) {
  PDS_QUARTERS nibbles.v[i] = nibbles.v[i] | ((fifths.v[i] >> k & 1) << 4);
  return nibbles;
}
PDS_INLINE B with_third(B pairs, B thirds, int k) {
  PDS_QUARTERS pairs.v[i] = pairs.v[i] | ((thirds.v[i] >> k & 1) << 2);
  return pairs;
}
PDS_INLINE B pairs(B fields, int k) {
  PDS_QUARTERS fields.v[i] = fields.v[i] >> 2 * k & 3;
  return fields;
}
PDS_INLINE B with_pair(B nibbles, B fields, int k) {
  PDS_QUARTERS nibbles.v[i] = nibbles.v[i] | ((fields.v[i] >> 2 * k & 3) << 4);
  return nibbles;
}
// A product of bytes fits into 16 bits, but the sum of two may not, so pairs are added in 32 bits.
PDS_INLINE I dot(I acc, B w, const int8_t* x) {
  const Short8 even = {x[0], x[2], x[0], x[2], x[0], x[2], x[0], x[2]};
  const Short8 odd = {x[1], x[3], x[1], x[3], x[1], x[3], x[1], x[3]};
  PDS_QUARTERS {
    Int4 a = (Int4)((Short8)((Half8)w.v[i] & 255) * even);
    Int4 b = (Int4)((Short8)((Half8)w.v[i] >> 8) * odd);
    Int4 low = ((Int4)((Word4)a << 16) >> 16) + ((Int4)((Word4)b << 16) >> 16);
    acc.v[i] += low + (a >> 16) + (b >> 16);
  }
  return acc;
}
PDS_INLINE I dot_small(I acc, B w, const int8_t* x) { return dot(acc, w, x); }
PDS_INLINE F dot_bf16(F acc, B w, const uint16_t* x) {
  I pair;
  __builtin_memcpy(&pair, &w, 64);
  F even = as_float(shift_left(pair, 16)), odd = as_float(and_(pair, set1_i((int32_t)0xFFFF0000)));
  acc = fma(even, as_float(set1_i((int32_t)((uint32_t)x[0] << 16))), acc);
  return fma(odd, as_float(set1_i((int32_t)((uint32_t)x[1] << 16))), acc);
}

PDS_INLINE float reduce_add(F a) {
  Float4 q = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
PDS_INLINE float larger(float a, float b) { return a > b ? a : b; }
PDS_INLINE float reduce_max(F a) {
  F h = {{a.v[2], a.v[3], a.v[2], a.v[3]}};
  h = max(a, h);
  F q = {{h.v[1], h.v[1], h.v[1], h.v[1]}};
  q = max(h, q);
  return larger(larger(q.v[0][0], q.v[0][2]), larger(q.v[0][1], q.v[0][3]));
}
PDS_INLINE int32_t reduce_add(I a) {
  Word4 q = ((Word4)a.v[0] + (Word4)a.v[1]) + ((Word4)a.v[2] + (Word4)a.v[3]);
  return (int32_t)((q[0] + q[1]) + (q[2] + q[3]));
}
PDS_INLINE int32_t reduce_max(I a) {
  int32_t r = a.v[0][0];
  for (int i = 1; i < 16; ++i) r = a.v[i / 4][i % 4] > r ? a.v[i / 4][i % 4] : r;
  return r;
}

#undef PDS_QUARTERS
