// The tables that this build has, best first; which of them the machine can run is asked at run time.
#pragma once
#include <string>
#include <vector>

#include "dispatch/table.h"

namespace pdserve {

// Tables that this machine can run, best first; never empty.
const std::vector<const Kernels*>& targets();

// The table of that name; for "" the one that the environment variable PDSERVE_NATIVE_ISA names, or
// the best one if it is unset or empty. Throws std::invalid_argument with the names.
const Kernels& select_target(const std::string& isa);

}  // namespace pdserve
