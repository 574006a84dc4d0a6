// The inputs of sampling one token: the key of its noise (kernels/reference/sampling.py) and filters.
#pragma once
#include "base/common.h"

namespace pdserve {

struct NoiseKey {
  int64_t seed = 0;
  int64_t choice = 0;
  int64_t position = 0;
};

// The filters of the tokens that may be sampled; kernels/reference/sampling.py defines them.
struct Filter {
  int64_t top_k = 0;  // 0: all
  double top_p = 1.0;
  float log_min_p = -__builtin_inff();

  bool active() const { return top_k > 0 || top_p < 1.0 || log_min_p > -__builtin_inff(); }
};

}  // namespace pdserve
