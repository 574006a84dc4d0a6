// The kernel tables of this build, best first. Which of them the machine supports is checked at run
// time.
#pragma once
#include <string>
#include <vector>

#include "dispatch/table.h"

namespace pdserve {

// Returns the tables that this machine supports, best first; never empty.
const std::vector<const Kernels*>& targets();

// Returns the table with a name; for "", the one that the environment variable PDSERVE_NATIVE_ISA
// names, or the best if it is unset or empty. Throws std::invalid_argument with the known names.
const Kernels& select_target(const std::string& isa);

}  // namespace pdserve
