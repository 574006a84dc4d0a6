#include <immintrin.h>

#include "dispatch/table.h"

#define PDS_ISA "avx512"

namespace pdserve::avx512 {

extern const Kernels kTable;

#include "simd/avx512.h"
#include "dispatch/kernels.inl"

}  // namespace pdserve::avx512
