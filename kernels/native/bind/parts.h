// From the description of a part, as Python hands it over, to the part.
#pragma once
#include "bind.h"
#include "decoder/stack.h"

// Both throw std::invalid_argument that begins with `name` if a field is missing, of another type
// or not known. A part may refer to tables of `stack`.
std::unique_ptr<pdserve::Part> make_part(const std::string& name, const std::string& kind,
                                         const nb::dict& fields, const pdserve::Stack& stack);
pdserve::NormPart make_norm(const std::string& name, const nb::dict& fields);

// silu, gelu_tanh or gelu; throws std::invalid_argument for another name.
pdserve::Activation activation_of(const std::string& name);
