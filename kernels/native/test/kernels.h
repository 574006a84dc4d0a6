// Shared definitions of the kernel tests: compares every target with generic, bit for bit.
#pragma once
#include <cmath>

#include "dispatch/targets.h"
#include "check.h"

namespace pdserve {

inline bool same_bits(float a, float b) {
  return !std::memcmp(&a, &b, 4) || (std::isnan(a) && std::isnan(b));
}

inline const Kernels& generic_kernels() { return select_target("generic"); }

// Returns a simple float16: a power of two from 2^-14 to 2^15 times 1 + fraction / 1024.
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

// Checks that two rows have the same bits; the message names kernel, target and index.
inline void check_same(const Kernels& target, const char* kernel, const float* got,
                       const float* want, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    CHECK(same_bits(got[i], want[i]), "%s %s of %d, at %d: %a, not %a", target.isa, kernel,
          static_cast<int>(count), static_cast<int>(i), got[i], want[i]);
  }
}

}  // namespace pdserve
