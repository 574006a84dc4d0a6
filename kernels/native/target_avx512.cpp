#include <immintrin.h>

#include "table.h"

#define PDS_ISA "avx512"

namespace pdserve::avx512 {

extern const Kernels kTable;

#include "simd/avx512.h"
// In the order in which they use each other.
#include "math.inl"
#include "encode.inl"
#include "linear.inl"
#include "elementwise.inl"
#include "attention.inl"
#include "sampling.inl"
#include "table.inl"

}  // namespace pdserve::avx512
