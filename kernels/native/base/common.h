// Common definitions of the kernels: sizes, inlining, alignment.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define PDS_INLINE static inline __attribute__((always_inline))

namespace pdserve {

constexpr int64_t kLanes = 16;      // floats in a vector, outputs in a tile of packed weights
constexpr int64_t kBlock = 32;      // values that share an activation scale
constexpr int64_t kAlign = 64;      // bytes

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace pdserve
