// The choice of experts as a separate function, with which tests compare other implementations.
#include <nanobind/stl/optional.h>

#include <vector>

#include "bind.h"
#include "decoder/experts.h"

using pdserve::Choice;
using pdserve::Routing;

void bind_routing(nb::module_& m) {
  m.def(
      "choose_experts",
      [](Context& context, const Array<const float, 2>& logits, const std::optional<Array<const float, 1>>& correction,
         bool sigmoid, bool normalized, float scale, int64_t groups, int64_t kept_groups,
         int64_t group_best, const Array<int64_t, 2>& chosen, const Array<float, 2>& weights) {
        const auto rows = static_cast<int64_t>(logits.shape(0));
        const auto experts = static_cast<int64_t>(logits.shape(1));
        const auto k = static_cast<int64_t>(chosen.shape(1));
        require(chosen.shape(0) == logits.shape(0) && weights.shape(0) == logits.shape(0) &&
                    weights.shape(1) == chosen.shape(1),
                "chosen and weights must be [rows, top_k]");
        require(!correction || correction->shape(0) == logits.shape(1),
                "correction must have one value an expert");
        const Routing routing{k, sigmoid, normalized, scale, groups, kept_groups, group_best};
        pdserve::check_routing(routing, experts);
        std::vector<float> scratch(
            static_cast<size_t>(pdserve::choosing_floats(routing, experts)));
        std::vector<Choice> row(static_cast<size_t>(k));
        for (int64_t r = 0; r < rows; ++r) {
          pdserve::choose_experts(context.kernels, routing, experts, logits.data() + r * experts,
                                  correction ? correction->data() : nullptr, scratch.data(),
                                  row.data());
          for (int64_t i = 0; i < k; ++i) {
            chosen.data()[r * k + i] = row[static_cast<size_t>(i)].expert;
            weights.data()[r * k + i] = row[static_cast<size_t>(i)].weight;
          }
        }
      },
      nb::arg("context"), nb::arg("logits").noconvert(), nb::arg("correction").none(), nb::arg("sigmoid"),
      nb::arg("normalized"), nb::arg("scale"), nb::arg("groups"), nb::arg("kept_groups"),
      nb::arg("group_best"), nb::arg("chosen").noconvert(), nb::arg("weights").noconvert(),
      "Writes the experts of each row of logits, float32 [rows, experts], best first, to chosen,\n"
      "int64 [rows, top_k], and their weights to weights, float32 [rows, top_k].\n"
      "ValueError for sizes that do not fit.");
}
