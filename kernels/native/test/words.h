// Runs every word of simd/ on the same operands, on each target and in plain scalar code.
#pragma once
#include "base/common.h"

namespace pdserve {

struct Operands {
  float a[16], b[16], c[16];
  int32_t i[16], j[16];
  uint8_t w[64];    // bytes of a weight
  int8_t x[4];      // inputs of dot
  uint16_t pair[2]; // inputs of dot_bf16
  uint16_t h[16];   // float16 or bf16
  int8_t q[16];
  int64_t n;        // lanes of the words that end in _n
  int shift;
  // Like a, h and q, but only n values each, which end at an inaccessible page.
  const float* a_tail;
  const uint16_t* h_tail;
  const int8_t* q_tail;
  float* out_tail;  // n floats
};

enum class Equal { kBits, kNumber, kNearly };  // kNumber: any NaN equals any other

struct Result {
  const char* word;
  Equal equal;
  uint32_t lane[16];
};

constexpr int kMaxResults = 112;

// Each function fills `results` and returns their number.
namespace avx512 { int run_words(const Operands& o, Result* results); }
namespace avx2 { int run_words(const Operands& o, Result* results); }
namespace generic { int run_words(const Operands& o, Result* results); }
namespace scalar { int run_words(const Operands& o, Result* results); }

}  // namespace pdserve
