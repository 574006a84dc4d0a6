#include <immintrin.h>

#include "dispatch/table.h"

#define PDS_ISA "avx2"

namespace pdserve::avx2 {

extern const Kernels kTable;

#include "simd/avx2.h"
#include "dispatch/kernels.inl"

}  // namespace pdserve::avx2
