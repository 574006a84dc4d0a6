// The extension pdserve.kernels._native: the kernels' interface to Python.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch/targets.h"

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels: see docs/cpu.md.";
  // At exit, Python does not free objects that module globals or daemon threads still hold.
  nanobind::set_leak_warnings(false);
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const pdserve::Kernels* table : pdserve::targets()) names.emplace_back(table->isa);
    return names;
  }, "Instruction sets that this machine can run, best first.");
  bind_context(m);
  bind_linear(m);
  bind_elementwise(m);
  bind_attention(m);
  bind_sampling(m);
  bind_routing(m);
  bind_stack(m);
  bind_copy_hash(m);
  bind_copy_past_caches(m);
}
