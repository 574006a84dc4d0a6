#include <immintrin.h>

#include "words.h"

namespace pdserve::avx2 {

#include "simd/avx2.h"
#include "words.inl"

}  // namespace pdserve::avx2
