// The kinds of parts by name, with the fields of each.
#include "parts.h"

#include "decoder/experts.h"
#include "decoder/head_linear.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <vector>

using namespace pdserve;

namespace {

constexpr int64_t kMostHeads = 1 << 16;

// The fields of a part; each is read once.
class Fields {
 public:
  explicit Fields(const nb::dict& dict) : dict_(dict) {}

  int64_t integer(const char* name, int64_t least, int64_t most) {
    const auto value = as<int64_t>(get(name), name, "an integer");
    if (value < least || value > most) {
      throw std::invalid_argument(std::string(name) + " must be " + std::to_string(least) + " to " +
                                  std::to_string(most));
    }
    return value;
  }

  float number(const char* name) {
    const auto value = as<float>(get(name), name, "a number");
    if (!std::isfinite(value)) throw std::invalid_argument(std::string(name) + " must be finite");
    return value;
  }

  std::string word(const char* name) { return as<std::string>(get(name), name, "a str"); }

  std::vector<float> floats(const char* name) {
    using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    const auto array = as<Floats>(get(name), name, "float32 [n]");
    return {array.data(), array.data() + array.size()};
  }
  std::vector<float> floats_or_none(const char* name) {
    if (dict_.contains(name) && !dict_[name].is_none()) return floats(name);
    know(name);
    return {};
  }

  // One vector per row; empty for None.
  std::vector<std::vector<float>> rows_or_none(const char* name) {
    using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
    know(name);
    std::vector<std::vector<float>> rows;
    if (!dict_.contains(name) || dict_[name].is_none()) return rows;
    const auto array = as<Rows>(dict_[name], name, "float32 [n, m]");
    for (size_t row = 0; row < array.shape(0); ++row) {
      const float* begin = array.data() + row * array.shape(1);
      rows.emplace_back(begin, begin + array.shape(1));
    }
    return rows;
  }

  std::vector<int64_t> integers(const char* name) {
    using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    const auto array = as<Integers>(get(name), name, "int64 [n]");
    return {array.data(), array.data() + array.size()};
  }

  std::vector<Matrix> matrices(const char* name) {
    return as<std::vector<Matrix>>(get(name), name, "a list of Matrix");
  }

  // Throws if there are fields that were not read.
  void done() const {
    for (const auto& [key, value] : dict_) {
      const auto name = nb::cast<std::string>(nb::str(key));
      if ((", " + known_ + ",").find(" " + name + ",") == std::string::npos) {
        throw std::invalid_argument("it has no field " + name + "; it has " +
                                    (known_.empty() ? "none" : known_));
      }
    }
  }

 private:
  void know(const char* name) { known_ += known_.empty() ? name : std::string(", ") + name; }

  nb::handle get(const char* name) {
    know(name);
    if (!dict_.contains(name)) throw std::invalid_argument(std::string(name) + " is missing");
    return PyDict_GetItemString(dict_.ptr(), name);
  }

  template <class T>
  static T as(nb::handle value, const char* name, const char* type) {
    T result;
    if (!nb::try_cast<T>(value, result)) {
      throw std::invalid_argument(std::string(name) + " must be " + type);
    }
    return result;
  }

  nb::dict dict_;
  std::string known_;
};

// Builds one expert per matrix of `gates`; biases are given for all experts or for none.
std::vector<Expert> experts(std::vector<Matrix> gates, std::vector<Matrix> ups,
                            std::vector<Matrix> downs,
                            std::vector<std::vector<float>> gate_up_biases,
                            std::vector<std::vector<float>> down_biases) {
  require(gates.size() == ups.size() && gates.size() == downs.size(),
          "gates, ups and downs must be as many");
  for (auto* biases : {&gate_up_biases, &down_biases}) {
    require(biases->empty() || biases->size() == gates.size(), "biases must be one an expert");
    biases->resize(gates.size());
  }
  std::vector<Expert> made;
  for (size_t i = 0; i < gates.size(); ++i) {
    made.push_back({std::move(gates[i]), std::move(ups[i]), std::move(downs[i]),
                    std::move(gate_up_biases[i]), std::move(down_biases[i])});
  }
  return made;
}

struct PartKind {
  const char* name;
  std::unique_ptr<Part> (*make)(Fields& f, const Stack& stack);
};

template <class T, class... Args>
std::unique_ptr<Part> part(Args&&... args) {
  return std::make_unique<T>(std::forward<Args>(args)...);
}

// Fields are read in separate statements, because the evaluation order of arguments is unspecified.
const PartKind kKinds[] = {
    {NormPart::kKind,
     [](Fields& f, const Stack&) {
       auto weight = f.floats("weight");
       return part<NormPart>(std::move(weight), f.number("eps"));
     }},
    {LayerNormPart::kKind,
     [](Fields& f, const Stack&) {
       auto weight = f.floats("weight");
       auto bias = f.floats_or_none("bias");
       return part<LayerNormPart>(std::move(weight), std::move(bias), f.number("eps"));
     }},
    {LinearPart::kKind,
     [](Fields& f, const Stack&) {
       auto matrices = f.matrices("matrices");
       return part<LinearPart>(std::move(matrices), f.floats_or_none("bias"));
     }},
    {HeadNormPart::kKind,
     [](Fields& f, const Stack&) {
       auto weight = f.floats("weight");
       const float eps = f.number("eps");
       const int64_t begin = f.integer("begin", 0, int64_t{1} << 40);
       return part<HeadNormPart>(std::move(weight), eps, begin, f.integer("heads", 1, kMostHeads));
     }},
    {HeadLayerNormPart::kKind,
     [](Fields& f, const Stack&) {
       auto weight = f.floats("weight");
       const float eps = f.number("eps");
       return part<HeadLayerNormPart>(std::move(weight), eps, f.integer("heads", 1, kMostHeads));
     }},
    {RopePart::kKind,
     [](Fields& f, const Stack& stack) {
       const auto tables = static_cast<int64_t>(stack.ropes.size());
       require(tables > 0, "no rope table is set");
       const RopeTable& table = stack.ropes[static_cast<size_t>(f.integer("table", 0, tables - 1))];
       const int64_t heads = f.integer("heads", 1, kMostHeads);
       const int64_t head_dim = f.integer("head_dim", 1, kMostHeads);
       return part<RopePart>(table, heads, head_dim, f.integer("begin", 0, int64_t{1} << 40));
     }},
    {AttentionPart::kKind,
     [](Fields& f, const Stack&) {
       auto made = std::make_unique<AttentionPart>();
       made->heads = f.integer("heads", 1, kMostHeads);
       made->kv_heads = f.integer("kv_heads", 1, kMostHeads);
       made->head_dim = f.integer("head_dim", 1, kMostHeads);
       made->scale = f.number("scale");
       made->soft_cap = f.number("soft_cap");
       require(made->soft_cap >= 0, "soft_cap must be 0 or more");
       made->window = f.integer("window", 0, int64_t{1} << 40);
       made->causal = f.integer("causal", 0, 1) != 0;
       made->group = f.integer("group", 0, 1 << 16);
       made->sinks = f.floats_or_none("sinks");
       made->latent = f.integer("latent", 0, made->head_dim);
       return std::unique_ptr<Part>(std::move(made));
     }},
    {HeadLinearPart::kKind,
     [](Fields& f, const Stack&) {
       auto matrices = f.matrices("matrices");
       return part<HeadLinearPart>(std::move(matrices), f.integer("kept", 0, kMostHeads));
     }},
    {GatePart::kKind,
     [](Fields& f, const Stack&) {
       return part<GatePart>(activation_of(f.word("activation")));
     }},
    {ActivatePart::kKind,
     [](Fields& f, const Stack&) {
       return part<ActivatePart>(activation_of(f.word("activation")));
     }},
    {XieluPart::kKind,
     [](Fields& f, const Stack&) {
       Xielu curve;
       curve.a = f.number("a");
       curve.b = f.number("b");
       curve.beta = f.number("beta");
       curve.eps = f.number("eps");
       return part<XieluPart>(curve);
     }},
    {ExpertsPart::kKind,
     [](Fields& f, const Stack&) {
       auto router = f.matrices("router");
       auto bias = f.floats_or_none("bias");
       auto correction = f.floats_or_none("correction");
       auto gates = f.matrices("gates");
       auto ups = f.matrices("ups");
       auto downs = f.matrices("downs");
       auto gate_up_biases = f.rows_or_none("gate_up_biases");
       auto routed = experts(std::move(gates), std::move(ups), std::move(downs),
                             std::move(gate_up_biases), f.rows_or_none("down_biases"));
       const auto three = f.matrices("shared");
       require(three.empty() || three.size() == 3, "shared must be gate, up and down, or nothing");
       std::vector<Expert> shared;
       if (!three.empty()) shared.push_back({three[0], three[1], three[2], {}, {}});
       Routing routing;
       routing.top_k = f.integer("top_k", 1, kMostHeads);
       routing.sigmoid = f.integer("sigmoid", 0, 1) != 0;
       routing.normalized = f.integer("normalized", 0, 1) != 0;
       routing.scale = f.number("scale");
       routing.groups = f.integer("groups", 1, kMostHeads);
       routing.kept_groups = f.integer("kept_groups", 1, kMostHeads);
       routing.group_best = f.integer("group_best", 1, 2);
       return part<ExpertsPart>(std::move(router), std::move(bias), std::move(correction),
                                std::move(routed), std::move(shared), routing,
                                gating_of(f.word("activation")));
     }},
    {ScalePart::kKind,
     [](Fields& f, const Stack&) { return part<ScalePart>(f.number("factor")); }},
    {ReorderPart::kKind,
     [](Fields& f, const Stack&) { return part<ReorderPart>(f.integers("order")); }},
    {HoldPart::kKind, [](Fields&, const Stack&) { return part<HoldPart>(); }},
    {ReplacePart::kKind, [](Fields&, const Stack&) { return part<ReplacePart>(); }},
    {AddPart::kKind,
     [](Fields& f, const Stack&) { return part<AddPart>(f.integer("held", 0, 1) != 0); }},
};

const PartKind& kind_of(const std::string& name) {
  std::string known;
  for (const PartKind& kind : kKinds) {
    if (name == kind.name) return kind;
    known += std::string(known.empty() ? "" : ", ") + kind.name;
  }
  throw std::invalid_argument("no such kind of part; known: " + known);
}

// Calls make(fields); errors begin with the part's name.
template <class Make>
auto named(const std::string& name, const nb::dict& dict, const Make& make) {
  try {
    Fields fields(dict);
    auto made = make(fields);
    fields.done();
    return made;
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + ": " + error.what());
  }
}

}  // namespace

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu2") return Activation::kRelu2;
  throw std::invalid_argument("activation must be silu, gelu_tanh, gelu or relu2, not '" + name +
                              "'");
}

Activation gating_of(const std::string& name) {
  return name == "swiglu_oai" ? Activation::kSwigluOai : activation_of(name);
}

std::unique_ptr<Part> make_part(const std::string& name, const std::string& kind,
                                const nb::dict& fields, const Stack& stack) {
  return named(name, fields, [&](Fields& f) { return kind_of(kind).make(f, stack); });
}
