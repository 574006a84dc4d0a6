// From the parts of all layers to what a step does: made once at load, from sizes alone.
//
// Parts are run in passes: each row goes through a run of parts at a time, until one needs several
// rows together. Passes between two attentions need no other rows than their own, so that a thread
// can take some rows through all of them. Results lie in places: one for the stream, one for what
// the step returns, and as many of each size as are used at a time.
#pragma once
#include <memory>

#include "decoder/parts.h"

namespace pdserve {

using Parts = std::vector<std::unique_ptr<Part>>;

constexpr size_t kStreamPlace = 0, kHiddenPlace = 1;  // index of both in Plan::widths

// A part, and the places of its input and its result.
struct Op {
  const Part* part;
  size_t in, out;
};

struct Pass {
  std::vector<Op> ops;
  int64_t cols;  // of the last part's input: how much work a row is
};

// Passes, and the attention that their last part stored keys for; none at the end of a step.
struct Segment {
  std::vector<Pass> passes;
  const AttentionPart* attention = nullptr;
  Op attend{};
  bool all_rows = false;  // a part wants them
};

struct Plan {
  std::vector<int64_t> widths;     // floats of a row of each place
  std::vector<Segment> segments;   // one for each attention, and the last
  size_t held = 0;                 // the place of what HoldParts keep; 0: there are none
  int64_t encoding_bytes = 0;      // of a row, for whatever part needs most
  int64_t products = 0;            // multiplications for a row
  std::vector<const AttentionPart*> groups;  // the first attention of each group, or null
  std::vector<int64_t> tile_costs;  // of a tile of keys for one head in all layers of a group, in
                                    // products
};

// Whether a layer of these parts can be run on a stream of `hidden` floats. Throws
// std::invalid_argument with the part that cannot; `layer` is its number.
void check_layer(const Parts& parts, int64_t hidden, size_t layer);

// The plan of layers that `check_layer` let pass, and of the norm behind them. The parts live as
// long as the plan.
Plan make_plan(std::vector<Parts>& layers, Part& last, int64_t hidden);

}  // namespace pdserve
