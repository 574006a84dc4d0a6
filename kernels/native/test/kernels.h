// What the tests of the kernels share: every target's result against generic's, bit for bit.
#pragma once
#include <cmath>

#include "dispatch/targets.h"
#include "check.h"

namespace pdserve {

inline bool same_bits(float a, float b) {
  return !std::memcmp(&a, &b, 4) || (std::isnan(a) && std::isnan(b));
}

inline const Kernels& generic_kernels() { return select_target("generic"); }

// A float as float16, of those that are easy to make: the powers of two from 2^-14 to 2^15 times
// 1 + fraction / 1024.
inline uint16_t half_of(bool negative, int exponent, int fraction) {
  return static_cast<uint16_t>(negative << 15 | (exponent + 15) << 10 | fraction);
}

inline uint16_t any_half(Random& random, int exponent) {
  return half_of(random.below(2), exponent - static_cast<int>(random.below(3)),
                 static_cast<int>(random.below(1024)));
}

inline void fill(Random& random, float* p, int64_t count, float size = 1) {
  for (int64_t i = 0; i < count; ++i) p[i] = random.uniform() * size;
}

// The same bits in all of two rows; says which kernel of which target is wrong where.
inline void check_same(const Kernels& target, const char* kernel, const float* got,
                       const float* want, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    CHECK(same_bits(got[i], want[i]), "%s %s of %d, at %d: %a, not %a", target.isa, kernel,
          static_cast<int>(count), static_cast<int>(i), got[i], want[i]);
  }
}

}  // namespace pdserve
