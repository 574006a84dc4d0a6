#include <immintrin.h>

#include "table.h"

#define PDS_ISA "avx2"

namespace pdserve::avx2 {

extern const Kernels kTable;

#include "simd/avx2.h"
#include "kernels.inl"

}  // namespace pdserve::avx2
