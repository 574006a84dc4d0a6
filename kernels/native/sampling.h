// The key of one token's noise: see kernels/reference/noise.py.
#pragma once
#include "common.h"

namespace pdserve {

struct NoiseKey {
  int64_t seed = 0;
  int64_t choice = 0;
  int64_t position = 0;
};

}  // namespace pdserve
