#include "bind.h"

void bind_linear(nb::module_&) {}
