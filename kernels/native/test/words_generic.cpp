#include "words.h"

namespace pdserve::generic {

#include "simd/generic.h"
#include "words.inl"

}  // namespace pdserve::generic
