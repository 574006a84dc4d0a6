#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch/targets.h"

void bind_context(nb::module_& m) {
  nb::class_<Context>(m, "Context", "Threads and the kernels that run on them.")
      .def("__init__",
           [](Context* self, int threads, const std::vector<int>& cpus, const std::string& isa,
              int spin_us) {
             require(threads >= 1 && threads <= 1024, "threads must be 1 to 1024");
             new (self) Context{pdserve::Pool(threads, cpus, spin_us), pdserve::select_target(isa)};
           },
           nb::arg("threads"), nb::arg("cpus") = std::vector<int>{}, nb::arg("isa") = "",
           nb::arg("spin_us") = 100,
           "threads: the caller's included; cpus: a core each, the caller's first; isa: one of\n"
           "isas(), by default PDSERVE_NATIVE_ISA of the environment or the best; spin_us: how\n"
           "long an idle helper spins. ValueError if there is no such isa.")
      .def_prop_ro("threads", [](const Context& c) { return c.pool.threads(); })
      .def_prop_ro("isa", [](const Context& c) { return std::string(c.kernels.isa); });
}
