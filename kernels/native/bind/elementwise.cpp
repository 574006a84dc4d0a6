#include "bind.h"

void bind_elementwise(nb::module_&) {}
