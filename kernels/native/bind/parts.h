// Builds parts from the descriptions that Python passes.
#pragma once
#include "bind.h"
#include "decoder/stack.h"

// Builds a part. Throws std::invalid_argument that begins with `name` if a field is missing,
// unknown or of the wrong type. A part may refer to tables of `stack`.
std::unique_ptr<pdserve::Part> make_part(const std::string& name, const std::string& kind,
                                         const nb::dict& fields, const pdserve::Stack& stack);

// Parses silu, gelu_tanh or gelu. Throws std::invalid_argument for another name.
pdserve::Activation activation_of(const std::string& name);
// Like `activation`, and also accepts swiglu_oai.
pdserve::Activation gating_of(const std::string& name);
