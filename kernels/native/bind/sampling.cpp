#include "bind.h"

void bind_sampling(nb::module_&) {}
