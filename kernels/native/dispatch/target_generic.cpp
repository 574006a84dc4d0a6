#include "dispatch/table.h"

#define PDS_ISA "generic"

namespace pdserve::generic {

extern const Kernels kTable;

#include "simd/generic.h"
#include "dispatch/kernels.inl"

}  // namespace pdserve::generic
