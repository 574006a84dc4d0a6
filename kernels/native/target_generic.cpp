#include "table.h"

#define PDS_ISA "generic"

namespace pdserve::generic {

extern const Kernels kTable;

#include "simd/generic.h"
// In the order in which they use each other.
#include "math.inl"
#include "encode.inl"
#include "linear.inl"
#include "elementwise.inl"
#include "attention.inl"
#include "sampling.inl"
#include "table.inl"

}  // namespace pdserve::generic
