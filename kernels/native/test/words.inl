// Runs every word of one target, in the order of words_scalar.cpp.
struct Sheet {
  Result* results;
  int count = 0;

  Result* next(const char* word, Equal equal) {
    Result* r = results + count++;
    r->word = word;
    r->equal = equal;
    for (int l = 0; l < 16; ++l) r->lane[l] = 0;
    return r;
  }
  void put(const char* word, F x, Equal equal = Equal::kNumber) {
    Result* r = next(word, equal);
    store((float*)r->lane, x);
  }
  void put(const char* word, I x) { store_i((int32_t*)next(word, Equal::kBits)->lane, x); }
  void put(const char* word, M x) { put(word, select(x, set1_i(1), set1_i(0))); }
  void put(const char* word, B x) {
    uint8_t bytes[64];
    __builtin_memcpy(bytes, &x, 64);
    __builtin_memcpy(next(word, Equal::kBits)->lane, bytes, 64);
  }
  void put_one(const char* word, uint32_t x, Equal equal = Equal::kBits) {
    next(word, equal)->lane[0] = x;
  }
  void put_one(const char* word, float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    put_one(word, u, Equal::kNumber);
  }
};

int run_words(const Operands& o, Result* results) {
  Sheet s{results};
  F a = load(o.a), b = load(o.b), c = load(o.c);
  I i = load_i(o.i), j = load_i(o.j);
  B w = load_b(o.w);
  s.put("zero", zero(), Equal::kBits);
  s.put("set1", set1(o.a[3]));
  s.put("load", a, Equal::kBits);
  s.put("load_n", load_n(o.a_tail, o.n), Equal::kBits);
  store_n(o.out_tail, b, o.n);
  s.put("store_n", load_n(o.out_tail, o.n), Equal::kBits);
  s.put("add", add(a, b));
  s.put("sub", sub(a, b));
  s.put("mul", mul(a, b));
  s.put("div", div(a, b));
  s.put("fma", fma(a, b, c));
  s.put("min", min(a, b));
  s.put("max", max(a, b));

  s.put("load_bf16", load_bf16(o.h), Equal::kBits);
  s.put("load_bf16_n", load_bf16_n(o.h_tail, o.n), Equal::kBits);
  s.put("load_f16", load_f16(o.h), Equal::kBits);
  s.put("load_f16_n", load_f16_n(o.h_tail, o.n), Equal::kBits);
  s.put("load_i8", load_i8(o.q), Equal::kBits);
  s.put("load_i8_n", load_i8_n(o.q_tail, o.n), Equal::kBits);
  s.put("load_e4m3", load_e4m3(o.w), Equal::kBits);

  s.put("set1_i", set1_i(o.i[5]));
  s.put("add_i", add(i, j));
  s.put("sub_i", sub(i, j));
  s.put("and_i", and_(i, j));
  s.put("or_i", or_(i, j));
  s.put("max_i", max(i, j));
  s.put("shift_left", shift_left(i, o.shift));
  s.put("shift_right", shift_right(i, o.shift));
  s.put("to_float", to_float(i), Equal::kBits);
  s.put("to_int", to_int(a));
  s.put("as_float", as_float(i), Equal::kBits);
  s.put("as_int", as_int(a));
  store_i8((int8_t*)s.next("store_i8", Equal::kBits)->lane, i);
  store_u16((uint16_t*)s.next("store_u16", Equal::kBits)->lane, i);
  store_f16((uint16_t*)s.next("store_f16", Equal::kBits)->lane, a);

  s.put("less", less(a, b));
  s.put("less_i", less(i, j));
  s.put("unordered", unordered(a));
  s.put("lanes_to", lanes(0, o.n));
  s.put("lanes_from", lanes(o.n, 16));
  s.put("and_m", and_(less(a, b), lanes(2, 13)));
  s.put_one("any", (uint32_t)any(less(a, b)));
  s.put_one("any_lane", (uint32_t)any(lanes(o.n, 16)));
  s.put_one("bits", bits(less(i, j)));
  s.put("select", select(less(a, b), b, c), Equal::kBits);
  s.put("select_i", select(less(a, b), i, j));

  uint8_t small[64];
  for (int k = 0; k < 64; ++k) small[k] = o.w[k] & 127;
  B sevens = load_b(small);
  s.put("low_nibbles", low_nibbles(w));
  s.put("high_nibbles", high_nibbles(w));
  s.put("lookup", lookup(low_nibbles(w), o.w + 48));
  s.put("with_fifth_0", with_fifth(low_nibbles(w), w, 0));
  s.put("with_fifth_3", with_fifth(high_nibbles(w), w, 3));
  s.put("with_fifth_7", with_fifth(low_nibbles(w), w, 7));
  for (int k = 0; k < 4; ++k) {
    s.put("pairs", pairs(w, k));
    s.put("with_pair", with_pair(low_nibbles(w), w, k));
  }
  for (int k = 0; k < 8; ++k) s.put("with_third", with_third(pairs(w, 1), w, k));
  s.put("dot", dot(set1_i(o.shift - 7), w, o.x));
  s.put("dot_small", dot_small(set1_i(o.shift - 7), sevens, o.x));
  s.put("dot_bf16", dot_bf16(c, w, o.pair), Equal::kNearly);

  s.put_one("reduce_add", reduce_add(c));
  s.put_one("reduce_max", reduce_max(a));
  s.put_one("reduce_add_i", (uint32_t)reduce_add(i));
  s.put_one("reduce_max_i", (uint32_t)reduce_max(i));
  return s.count;
}
