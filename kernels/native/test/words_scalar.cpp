// The meaning of every word of simd/, one lane at a time, without regard to speed.
#include <cmath>
#include <limits>

#include "words.h"

namespace pdserve::scalar {
namespace {

struct Sheet {
  Result* results;
  int count = 0;

  Result* next(const char* word) {
    results[count] = {word, Equal::kBits, {}};
    return results + count++;
  }
  template <class Lane>
  void put(const char* word, const Lane& lane) {
    Result* r = next(word);
    for (int l = 0; l < 16; ++l) {
      auto value = lane(l);
      static_assert(sizeof value == 4);
      std::memcpy(&r->lane[l], &value, 4);
    }
  }
  template <class Value>
  void put_one(const char* word, Value value) {
    static_assert(sizeof value == 4);
    std::memcpy(next(word)->lane, &value, 4);
  }
};

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float from_bf16(uint16_t h) { return as_float(static_cast<uint32_t>(h) << 16); }

float from_f16(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, fraction = h & 0x3FF;
  int exponent = h >> 10 & 31;
  if (exponent == 31 && fraction) return as_float(sign | 0x7FC00000 | fraction << 13);
  if (exponent == 31) return as_float(sign | 0x7F800000);
  float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return sign ? -size : size;
}

uint16_t to_f16(float x) {
  uint32_t bits = as_bits(x);
  uint16_t sign = bits >> 16 & 0x8000;
  if (std::isnan(x)) return sign | 0x7E00 | (bits >> 13 & 0x3FF);
  double size = std::fabs(static_cast<double>(x));
  if (size >= 65520) return sign | 0x7C00;
  int exponent = -14;
  while (size >= std::ldexp(2.0, exponent)) ++exponent;
  // In units of the last place; 1024 of them are the hidden bit. A carry increments the exponent.
  auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + units));
}

int32_t to_int(float x) {
  if (!(x >= -2147483648.0f && x < 2147483648.0f)) return std::numeric_limits<int32_t>::min();
  return static_cast<int32_t>(std::nearbyint(static_cast<double>(x)));
}

float smaller(float a, float b) { return a < b ? a : b; }
float larger(float a, float b) { return a > b ? a : b; }

template <class Join>
float tree(const float* x, const Join& join) {
  float t[16];
  std::memcpy(t, x, sizeof t);
  for (int half = 8; half; half /= 2) {
    for (int l = 0; l < half; ++l) t[l] = join(t[l], t[l + half]);
  }
  return t[0];
}

int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }

}  // namespace

int run_words(const Operands& o, Result* results) {
  Sheet s{results};
  auto ui = [&](int l) { return static_cast<uint32_t>(o.i[l]); };
  auto uj = [&](int l) { return static_cast<uint32_t>(o.j[l]); };
  auto tail = [&](int l) { return l < o.n; };
  s.put("zero", [](int) { return 0.0f; });
  s.put("set1", [&](int) { return o.a[3]; });
  s.put("load", [&](int l) { return o.a[l]; });
  s.put("load_n", [&](int l) { return tail(l) ? o.a[l] : 0.0f; });
  s.put("store_n", [&](int l) { return tail(l) ? o.b[l] : 0.0f; });
  s.put("add", [&](int l) { return o.a[l] + o.b[l]; });
  s.put("sub", [&](int l) { return o.a[l] - o.b[l]; });
  s.put("mul", [&](int l) { return o.a[l] * o.b[l]; });
  s.put("div", [&](int l) { return o.a[l] / o.b[l]; });
  s.put("fma", [&](int l) { return std::fma(o.a[l], o.b[l], o.c[l]); });
  s.put("min", [&](int l) { return smaller(o.a[l], o.b[l]); });
  s.put("max", [&](int l) { return larger(o.a[l], o.b[l]); });

  s.put("load_bf16", [&](int l) { return from_bf16(o.h[l]); });
  s.put("load_bf16_n", [&](int l) { return tail(l) ? from_bf16(o.h[l]) : 0.0f; });
  s.put("load_f16", [&](int l) { return from_f16(o.h[l]); });
  s.put("load_f16_n", [&](int l) { return tail(l) ? from_f16(o.h[l]) : 0.0f; });
  s.put("load_i8", [&](int l) { return static_cast<float>(o.q[l]); });
  s.put("load_i8_n", [&](int l) { return tail(l) ? static_cast<float>(o.q[l]) : 0.0f; });
  s.put("load_e4m3", [&](int l) {
    const int exponent = o.w[l] >> 3 & 15, mantissa = o.w[l] & 7;
    const float size = exponent ? std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10)
                                : std::ldexp(static_cast<float>(mantissa), -9);
    return std::copysign(size / 256, o.w[l] & 0x80 ? -1.0f : 1.0f);
  });

  s.put("set1_i", [&](int) { return o.i[5]; });
  s.put("add_i", [&](int l) { return ui(l) + uj(l); });
  s.put("sub_i", [&](int l) { return ui(l) - uj(l); });
  s.put("and_i", [&](int l) { return o.i[l] & o.j[l]; });
  s.put("or_i", [&](int l) { return o.i[l] | o.j[l]; });
  s.put("max_i", [&](int l) { return o.i[l] > o.j[l] ? o.i[l] : o.j[l]; });
  s.put("shift_left", [&](int l) { return ui(l) << o.shift; });
  s.put("shift_right", [&](int l) { return ui(l) >> o.shift; });
  s.put("to_float", [&](int l) { return static_cast<float>(o.i[l]); });
  s.put("to_int", [&](int l) { return to_int(o.a[l]); });
  s.put("as_float", [&](int l) { return o.i[l]; });
  s.put("as_int", [&](int l) { return o.a[l]; });
  auto* bytes = reinterpret_cast<int8_t*>(s.next("store_i8")->lane);
  for (int l = 0; l < 16; ++l) bytes[l] = o.i[l] < -128 ? -128 : o.i[l] > 127 ? 127 : o.i[l];
  auto* words = reinterpret_cast<uint16_t*>(s.next("store_u16")->lane);
  for (int l = 0; l < 16; ++l) words[l] = static_cast<uint16_t>(o.i[l]);
  auto* halves = reinterpret_cast<uint16_t*>(s.next("store_f16")->lane);
  for (int l = 0; l < 16; ++l) halves[l] = to_f16(o.a[l]);

  s.put("less", [&](int l) { return int{o.a[l] < o.b[l]}; });
  s.put("less_i", [&](int l) { return int{o.i[l] < o.j[l]}; });
  s.put("unordered", [&](int l) { return int{std::isnan(o.a[l])}; });
  s.put("lanes_to", [&](int l) { return int{tail(l)}; });
  s.put("lanes_from", [&](int l) { return int{!tail(l)}; });
  s.put("and_m", [&](int l) { return int{o.a[l] < o.b[l] && l >= 2 && l < 13}; });
  uint32_t less_a = 0, less_i = 0;
  for (int l = 0; l < 16; ++l) {
    less_a |= uint32_t{o.a[l] < o.b[l]} << l;
    less_i |= uint32_t{o.i[l] < o.j[l]} << l;
  }
  s.put_one("any", int{less_a != 0});
  s.put_one("any_lane", int{o.n < 16});
  s.put_one("bits", less_i);
  s.put("select", [&](int l) { return o.a[l] < o.b[l] ? o.b[l] : o.c[l]; });
  s.put("select_i", [&](int l) { return o.a[l] < o.b[l] ? o.i[l] : o.j[l]; });

  auto* low = reinterpret_cast<uint8_t*>(s.next("low_nibbles")->lane);
  for (int k = 0; k < 64; ++k) low[k] = o.w[k] & 15;
  auto* high = reinterpret_cast<uint8_t*>(s.next("high_nibbles")->lane);
  for (int k = 0; k < 64; ++k) high[k] = o.w[k] >> 4;
  auto* found = reinterpret_cast<uint8_t*>(s.next("lookup")->lane);
  for (int k = 0; k < 64; ++k) found[k] = o.w[48 + (o.w[k] & 15)];
  auto fifth = [&](const char* word, int shift, int bit) {
    auto* out = reinterpret_cast<uint8_t*>(s.next(word)->lane);
    for (int k = 0; k < 64; ++k) {
      out[k] = static_cast<uint8_t>((o.w[k] >> shift & 15) | (o.w[k] >> bit & 1) << 4);
    }
  };
  fifth("with_fifth_0", 0, 0);
  fifth("with_fifth_3", 4, 3);
  fifth("with_fifth_7", 0, 7);
  auto bytes_of = [&](const char* word, auto&& value) {
    auto* out = reinterpret_cast<uint8_t*>(s.next(word)->lane);
    for (int k = 0; k < 64; ++k) out[k] = static_cast<uint8_t>(value(o.w[k]));
  };
  for (int k = 0; k < 4; ++k) {
    bytes_of("pairs", [&](int w) { return w >> 2 * k & 3; });
    bytes_of("with_pair", [&](int w) { return (w & 15) | (w >> 2 * k & 3) << 4; });
  }
  for (int k = 0; k < 8; ++k) {
    bytes_of("with_third", [&](int w) { return (w >> 2 & 3) | (w >> k & 1) << 2; });
  }
  auto dot = [&](int l, int mask) {
    int sum = o.shift - 7;
    for (int k = 0; k < 4; ++k) sum += (o.w[4 * l + k] & mask) * o.x[k];
    return sum;
  };
  s.put("dot", [&](int l) { return dot(l, 255); });
  s.put("dot_small", [&](int l) { return dot(l, 127); });
  s.put("dot_bf16", [&](int l) {
    uint16_t pair[2];
    std::memcpy(pair, o.w + 4 * l, 4);
    double sum = o.c[l];
    for (int k = 0; k < 2; ++k) sum += double{from_bf16(pair[k])} * from_bf16(o.pair[k]);
    return static_cast<float>(sum);
  });

  s.put_one("reduce_add", tree(o.c, [](float a, float b) { return a + b; }));
  s.put_one("reduce_max", tree(o.a, larger));
  uint32_t sum = 0;
  int32_t most = o.i[0];
  for (int l = 0; l < 16; ++l) {
    sum += ui(l);
    most = most > o.i[l] ? most : o.i[l];
  }
  s.put_one("reduce_add_i", wrap(sum));
  s.put_one("reduce_max_i", most);
  return s.count;
}

}  // namespace pdserve::scalar
