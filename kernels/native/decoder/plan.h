// The plan of a step, computed once at load from the parts of all layers and their sizes.
//
// Parts run in passes: each row goes through consecutive parts until one needs several rows
// together. Passes between two attentions need only their own rows, so that a thread can take some
// rows through all of them. Results are stored in places: one for the stream, one for the step's
// result, and as many of each size as are used at a time.
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
  int64_t cols;  // of the last part's input: the amount of work per row
};

// Passes, and the attention whose keys their last part stored; null at the end of a step.
struct Segment {
  std::vector<Pass> passes;
  const AttentionPart* attention = nullptr;
  Op attend{};
  bool all_rows = false;  // a part needs all rows at once
};

struct Plan {
  std::vector<int64_t> widths;     // floats of a row of each place
  std::vector<Segment> segments;   // one per attention, and the last
  size_t held = 0;                 // the place of held rows; 0: there are no HoldParts
  int64_t encoding_bytes = 0;      // per row, for the part that needs most
  int64_t products = 0;            // multiplications per row
  int64_t positions = INT64_MAX;   // a token's position is less: the rows of the smallest table
  std::vector<const AttentionPart*> groups;  // the first attention of each group, or null
  std::vector<int64_t> tile_costs;  // of a tile of keys for one head in all layers of a group, in
                                    // products
};

// Checks that a layer of these parts can run on a stream of `hidden` floats. Throws
// std::invalid_argument that names the unsuitable part; `layer` is the layer's number.
void check_layer(const Parts& parts, int64_t hidden, size_t layer);

// Returns the plan of layers that `check_layer` accepted and of the final norm. The parts must
// outlive the plan.
Plan make_plan(std::vector<Parts>& layers, Part& last, int64_t hidden);

}  // namespace pdserve
