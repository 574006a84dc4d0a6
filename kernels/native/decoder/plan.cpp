#include "decoder/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pdserve {
namespace {

const AttentionPart* as_attention(const Part& part) {
  return dynamic_cast<const AttentionPart*>(&part);
}

class Planner {
 public:
  explicit Planner(int64_t hidden) { plan_.widths = {hidden, hidden}; }

  // Adds the next part; `last`: its result is the step's result.
  void add(Part& part, bool last) {
    const int64_t inputs = plan_.widths[value_];
    const size_t in = value_;
    if (dynamic_cast<HoldPart*>(&part) && !plan_.held) {
      plan_.held = plan_.widths.size();
      plan_.widths.push_back(inputs);
    }
    value_ = last ? kHiddenPlace : place_of_result(part, part.fit(inputs));
    pass_.ops.push_back({&part, in, value_});
    pass_.cols = inputs;
    plan_.encoding_bytes = std::max(plan_.encoding_bytes, part.encoding_bytes());
    plan_.products += part.products();
    const auto* table = dynamic_cast<const PositionsPart*>(&part);
    if (table) plan_.positions = std::min(plan_.positions, table->count());
    segment_.all_rows |= part.wants_all_rows();
    if (part.ends_pass() || last) end_pass();
    const AttentionPart* attention = as_attention(part);
    if (attention) note_group(*attention);
    if (attention || last) {
      segment_.attention = attention;
      segment_.attend = {&part, in, value_};
      plan_.segments.push_back(std::move(segment_));
      segment_ = {};
    }
  }

  Plan done() { return std::move(plan_); }

 private:
  size_t place_of_result(const Part& part, int64_t width) {
    const Writes writes = part.writes();
    if (writes == Writes::kStream) return kStreamPlace;
    const bool over = writes == Writes::kAnywhere && value_ != kStreamPlace;
    if (over || writes == Writes::kInput) return value_;
    // Each place has rows of one size, so that threads at different parts never share its memory.
    for (size_t place = kHiddenPlace + 1; place < plan_.widths.size(); ++place) {
      const bool taken = place == value_ || (plan_.held && place == plan_.held);
      if (plan_.widths[place] == width && !taken) return place;
    }
    plan_.widths.push_back(width);
    return plan_.widths.size() - 1;
  }

  void end_pass() {
    segment_.passes.push_back(std::move(pass_));
    pass_ = {};
  }

  void note_group(const AttentionPart& attention) {
    const auto group = static_cast<size_t>(attention.group);
    if (plan_.groups.size() <= group) {
      plan_.groups.resize(group + 1);
      plan_.tile_costs.resize(group + 1);
    }
    if (!plan_.groups[group]) plan_.groups[group] = &attention;
    // A tile of attention takes about three times as long as the same number of products.
    plan_.tile_costs[group] += 3 * 2 * kKeyTile * attention.head_dim;
  }

  Plan plan_;
  size_t value_ = kStreamPlace;  // the place of a row's value
  Pass pass_{};
  Segment segment_{};
};

[[noreturn]] void refuse(size_t layer, size_t part, const Part& what, const std::string& why) {
  throw std::invalid_argument("layer " + std::to_string(layer) + ", part " + std::to_string(part) +
                              " (" + what.kind() + "): " + why);
}

}  // namespace

void check_layer(const Parts& parts, int64_t hidden, size_t layer) {
  int64_t width = hidden;
  int attentions = 0;
  bool on_stream = true, holds = false;
  for (size_t n = 0; n < parts.size(); ++n) {
    Part& part = *parts[n];
    const Writes writes = part.writes();
    if (on_stream && (writes == Writes::kInput || writes == Writes::kStream)) {
      refuse(layer, n, part, "it must not take the residual stream itself");
    }
    if (writes == Writes::kStream && width != hidden) {
      refuse(layer, n, part, "a row has " + std::to_string(width) + " values, the stream " +
                                 std::to_string(hidden));
    }
    const auto* add = dynamic_cast<AddPart*>(&part);
    const bool hold = dynamic_cast<HoldPart*>(&part) != nullptr;
    if (hold && holds) refuse(layer, n, part, "it holds one row at a time");
    if (add && add->held() != holds) {
      refuse(layer, n, part, holds ? "it must add what is held" : "nothing is held");
    }
    if (holds && as_attention(part)) refuse(layer, n, part, "it comes before what is held");
    const bool positional = dynamic_cast<RopePart*>(&part) || dynamic_cast<PositionsPart*>(&part);
    if (attentions && positional) {  // positions belong to all tokens
      refuse(layer, n, part, "it comes behind the attention, where rows are renumbered");
    }
    holds = hold || (holds && !add);
    if (as_attention(part) && ++attentions > 1) {
      refuse(layer, n, part, "a layer has one attention");
    }
    try {
      width = part.fit(width);
    } catch (const std::invalid_argument& error) {
      refuse(layer, n, part, error.what());
    }
    on_stream = writes == Writes::kStream;
  }
  const std::string where = "layer " + std::to_string(layer) + ": ";
  if (parts.empty()) throw std::invalid_argument(where + "it has no parts");
  if (!attentions) throw std::invalid_argument(where + "it has no attention");
  if (!on_stream || holds) refuse(layer, parts.size() - 1, *parts.back(), "a layer must end with add");
}

Plan make_plan(std::vector<Parts>& layers, Part& last, int64_t hidden) {
  std::vector<Part*> parts;
  for (Parts& layer : layers) {
    for (std::unique_ptr<Part>& part : layer) parts.push_back(part.get());
  }
  parts.push_back(&last);
  Planner planner(hidden);
  for (size_t n = 0; n < parts.size(); ++n) {
    Part& part = *parts[n];
    if (n + 1 < parts.size() && part.fuse(*parts[n + 1])) ++n;
    planner.add(part, n + 1 == parts.size());
  }
  return planner.done();
}

}  // namespace pdserve
