#include "bind.h"

void bind_attention(nb::module_&) {}
