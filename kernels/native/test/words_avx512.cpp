#include <immintrin.h>

#include "words.h"

namespace pdserve::avx512 {

#include "simd/avx512.h"
#include "words.inl"

}  // namespace pdserve::avx512
