#include <immintrin.h>

#include "table.h"

#define PDS_ISA "avx2"

namespace pdserve::avx2 {

extern const Kernels kTable;

#include "simd/avx2.h"
// In the order in which they use each other.
#include "math.inl"
#include "encode.inl"
#include "linear.inl"
#include "elementwise.inl"
#include "attention.inl"
#include "sampling.inl"
#include "table.inl"

}  // namespace pdserve::avx2
