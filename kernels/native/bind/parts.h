// From the description of a part, as Python hands it over, to the part.
#pragma once
#include "bind.h"
#include "decoder/stack.h"

// Throws std::invalid_argument that begins with `name` if a field is missing, of another type or not
// known. A part may refer to tables of `stack`.
std::unique_ptr<pdserve::Part> make_part(const std::string& name, const std::string& kind,
                                         const nb::dict& fields, const pdserve::Stack& stack);

// silu, gelu_tanh or gelu; throws std::invalid_argument for another name.
pdserve::Activation activation_of(const std::string& name);
// As above, or swiglu_oai.
pdserve::Activation gating_of(const std::string& name);
