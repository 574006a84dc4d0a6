#include "decoder/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "base/require.h"
#include "decoder/groups.h"

namespace pdserve {
namespace {

constexpr float kLeastSum = 1e-20f;  // lower bound of the divisor of normalized weights

void scores_of(const Kernels& kernels, const Routing& routing, int64_t experts,
               const float* logits, float* scores) {
  if (routing.sigmoid) {
    std::copy_n(logits, experts, scores);
    return kernels.sigmoid(scores, experts);
  }
  const float most = *std::max_element(logits, logits + experts);
  for (int64_t i = 0; i < experts; ++i) scores[i] = logits[i] - most;
  kernels.exponential(scores, experts);
  const float sum = std::accumulate(scores, scores + experts, 0.0f);
  for (int64_t i = 0; i < experts; ++i) scores[i] /= sum;
}

// Returns the index of the largest rank whose `taken` is 0; ties go to the first; NaN ranks lowest.
int64_t best_of(const float* ranks, const float* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (taken && taken[i] != 0) continue;
    if (best < 0 || ranks[i] > ranks[best] || (std::isnan(ranks[best]) && !std::isnan(ranks[i]))) {
      best = i;
    }
  }
  return best;
}

// Returns the sum of a group's best values.
float quality(const float* values, int64_t count, int64_t wanted) {
  if (wanted == 1) return values[best_of(values, nullptr, count)];
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else if (values[i] > second) {
      second = values[i];
    }
  }
  return first + second;
}

void check_expert(const Expert& expert, int64_t values, int64_t size, const char* name) {
  require(expert.gate.cols == values && expert.up.cols == values && expert.down.rows == values,
          std::string(name) + ": a product is not over " + std::to_string(values) + " values");
  require(expert.gate.rows == size && expert.up.rows == size && expert.down.cols == size,
          std::string(name) + ": gate, up and down must have one size");
  const auto fits = [](const std::vector<float>& bias, int64_t rows) {
    return bias.empty() || static_cast<int64_t>(bias.size()) == rows;
  };
  require(fits(expert.gate_up_bias, 2 * size) && fits(expert.down_bias, values),
          std::string(name) + ": a bias must have one value an output");
}

}  // namespace

void check_routing(const Routing& routing, int64_t experts) {
  require(routing.top_k >= 1 && routing.top_k <= experts, "top_k must be 1 to the experts");
  require(routing.groups >= 1 && experts % routing.groups == 0,
          "experts must be a multiple of groups");
  const int64_t size = experts / routing.groups;
  require(routing.kept_groups >= 1 && routing.kept_groups <= routing.groups,
          "kept_groups must be 1 to groups");
  require(routing.group_best >= 1 && routing.group_best <= std::min<int64_t>(2, size),
          "group_best must be 1 or 2, and no more than a group has");
  require(routing.top_k <= routing.kept_groups * size, "top_k is more than the kept groups have");
}

void choose_experts(const Kernels& kernels, const Routing& routing, int64_t experts,
                    const float* logits, const float* correction, float* scratch, Choice* chosen) {
  float *scores = scratch, *ranks = scores + experts, *taken = ranks + experts;
  float *qualities = taken + experts, *kept = qualities + routing.groups;
  scores_of(kernels, routing, experts, logits, scores);
  for (int64_t i = 0; i < experts; ++i) ranks[i] = scores[i] + (correction ? correction[i] : 0);
  std::fill_n(taken, experts, 0.0f);
  if (routing.groups > 1) {
    const int64_t size = experts / routing.groups;
    std::fill_n(kept, routing.groups, 0.0f);
    for (int64_t g = 0; g < routing.groups; ++g) {
      qualities[g] = quality(ranks + g * size, size, routing.group_best);
    }
    for (int64_t n = 0; n < routing.kept_groups; ++n) {
      kept[best_of(qualities, kept, routing.groups)] = 1;
    }
    for (int64_t i = 0; i < experts; ++i) taken[i] = 1 - kept[i / size];
  }
  float sum = 0;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const int64_t best = best_of(ranks, taken, experts);
    chosen[k] = {best, scores[best]};
    sum += scores[best];
    taken[best] = 1;
  }
  for (int64_t k = 0; k < routing.top_k; ++k) {
    if (routing.normalized) chosen[k].weight /= sum + kLeastSum;
    chosen[k].weight *= routing.scale;
  }
}

ExpertsPart::ExpertsPart(std::vector<Matrix> router, std::vector<float> bias,
                         std::vector<float> correction, std::vector<Expert> experts,
                         std::vector<Expert> shared, Routing routing, Activation activation)
    : router_(std::move(router)),
      bias_(std::move(bias)),
      correction_(std::move(correction)),
      experts_(std::move(experts)),
      shared_(std::move(shared)),
      routing_(routing),
      activation_(activation) {
  require(!experts_.empty(), "it has no experts");
  require(shared_.size() <= 1, "it has more than one shared expert");
  require(router_.size() == 1 || (router_.size() == 2 && shared_.size() == 1),
          "router must be its matrix, and a shared expert's gate");
  values_ = router_[0].cols;
  const auto count = static_cast<int64_t>(experts_.size());
  require(router_[0].rows == count, "the router must have one row an expert");
  require(router_.size() == 1 || (router_[1].rows == 1 && router_[1].cols == values_),
          "the shared expert's gate must be one row");
  for (const Matrix& matrix : router_) {
    require(matrix.layout == Layout::kF32 || matrix.layout == Layout::kF16,
            "the router must be of float32 or float16");
  }
  require(bias_.empty() || static_cast<int64_t>(bias_.size()) == count,
          "bias must have one value an expert");
  if (!bias_.empty()) bias_.resize(static_cast<size_t>(count) + router_.size() - 1);
  require(correction_.empty() || static_cast<int64_t>(correction_.size()) == count,
          "correction must have one value an expert");
  check_routing(routing_, count);
  for (const Expert& expert : experts_) {
    check_expert(expert, values_, experts_[0].gate.rows, "an expert");
  }
  if (!shared_.empty()) check_expert(shared_[0], values_, shared_[0].gate.rows, "the shared expert");
  const auto note = [&](const std::vector<Expert>& some, uint32_t& middle_needs) {
    for (const Expert& expert : some) {
      for (const Matrix* matrix : {&expert.gate, &expert.up}) {
        needs_ |= encoding_of(*matrix);
        reads_floats_ |= encoding_of(*matrix) == kFloat;
      }
      middle_needs |= encoding_of(expert.down);
    }
  };
  note(experts_, middle_needs_);
  note(shared_, shared_middle_needs_);
}

int64_t ExpertsPart::fit(int64_t inputs) {
  require(inputs == values_, "inputs of " + std::to_string(values_) + ", not " +
                                 std::to_string(inputs));
  return inputs;
}

// Computes the router's logits.
void ExpertsPart::route(const Step& step, Piece& piece) const {
  const Matrix* routers[] = {&router_.front(), &router_.back()};
  piece.logits = step.scratch.logits.at_least(piece.rows * router_outputs());
  Activations plain;
  plain.rows = piece.rows;
  plain.cols = values_;
  plain.f32 = piece.x;
  run_linear(step.pool, step.kernels, routers, has_gate() ? 2 : 1, plain, piece.logits,
             router_outputs(), bias_.empty() ? nullptr : bias_.data());
}

// Chooses each row's experts and sorts them by number.
void ExpertsPart::choose(const Step& step, Piece& piece) const {
  const int64_t k = routing_.top_k, floats = choosing_floats(routing_, count());
  const int64_t ranges = ceil_div(piece.rows, kRowsPerPiece);
  float* choosing = step.scratch.choosing.at_least(ranges * floats);
  piece.chosen = step.scratch.chosen.at_least(piece.slots);
  const float* correction = correction_.empty() ? nullptr : correction_.data();
  const Rows rows{0, piece.rows, false};
  each_range(step.pool, rows, k * count(), [&](int64_t begin, int64_t end) {
    float* scratch = choosing + begin / kRowsPerPiece * floats;
    for (int64_t row = begin; row < end; ++row) {
      Choice* own = piece.chosen + row * k;
      choose_experts(step.kernels, routing_, count(), piece.logits + row * router_outputs(),
                     correction, scratch, own);
      std::sort(own, own + k, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
    }
  });
}

void ExpertsPart::assign_slots(const Step& step, Piece& piece) const {
  int64_t* begins = step.scratch.begins.at_least(2 * count() + 1);
  int64_t* next = begins + count() + 1;
  piece.begins = begins;
  piece.slot_of = step.scratch.slot_of.at_least(piece.slots);
  piece.row_of = step.scratch.row_of.at_least(piece.slots);
  std::fill_n(begins, count() + 1, 0);
  for (int64_t i = 0; i < piece.slots; ++i) ++begins[piece.chosen[i].expert + 1];
  std::partial_sum(begins, begins + count() + 1, begins);
  std::copy_n(begins, count(), next);
  for (int64_t i = 0; i < piece.slots; ++i) {
    piece.slot_of[i] = next[piece.chosen[i].expert]++;
    piece.row_of[piece.slot_of[i]] = i / routing_.top_k;
  }
}

// Encodes each row once and copies the encodings to the row's slots.
void ExpertsPart::encode_inputs(const Step& step, Piece& piece) const {
  GroupScratch& scratch = step.scratch;
  const Rows rows{0, piece.rows, false}, slots{0, piece.slots, false};
  float* inputs = reads_floats_ ? scratch.inputs.at_least(piece.slots * values_) : nullptr;
  piece.all = activations_of(piece.rows, values_, needs_, piece.x, scratch.row_encodings);
  piece.in = activations_of(piece.slots, values_, needs_, inputs, scratch.encodings);
  each_row(step.pool, rows, values_, [&](int64_t row) {
    step.kernels.encode(piece.all, row, row + 1);
  });
  each_row(step.pool, slots, values_, [&](int64_t slot) {
    const int64_t row = piece.row_of[slot];
    if (inputs) std::copy_n(piece.x + row * values_, values_, inputs + slot * values_);
    copy_encodings(piece.all, row, piece.in, slot);
  });
}

void ExpertsPart::compute(const Step& step, const std::vector<Expert>& experts,
                          uint32_t middle_needs, const int64_t* begins, const Activations& in,
                          float* results) const {
  GroupScratch& scratch = step.scratch;
  const int64_t slots = in.rows, size = experts[0].gate.rows;
  float* products = scratch.products.at_least(slots * 2 * size);
  float* middles = scratch.middles.at_least(slots * size);
  const Activations middle =
      activations_of(slots, size, middle_needs, middles, scratch.middle_encodings);
  multiply_groups(
      step, experts.size(), begins, in, products, 2 * size,
      [&](size_t e) { return std::array<const Matrix*, 2>{&experts[e].gate, &experts[e].up}; },
      [&](size_t e) -> const std::vector<float>& { return experts[e].gate_up_bias; });
  each_row(step.pool, Rows{0, slots, false}, size, [&](int64_t slot) {
    const float* gate = products + slot * 2 * size;
    step.kernels.gated(gate, gate + size, activation_, size, middles + slot * size);
    step.kernels.encode(middle, slot, slot + 1);
  });
  multiply_groups(
      step, experts.size(), begins, middle, results, values_,
      [&](size_t e) { return std::array<const Matrix*, 1>{&experts[e].down}; },
      [&](size_t e) -> const std::vector<float>& { return experts[e].down_bias; });
}

void ExpertsPart::compute_experts(const Step& step, Piece& piece) const {
  float* results = step.scratch.results.at_least(piece.slots * values_);
  compute(step, experts_, middle_needs_, piece.begins, piece.in, results);
  piece.results = results;
  if (shared_.empty()) return;
  float* shared = step.scratch.shared.at_least(piece.rows * values_);
  const int64_t whole[] = {0, piece.rows};
  compute(step, shared_, shared_middle_needs_, whole, piece.all, shared);
  piece.shared = shared;
}

// Adds the weighted results of a row's experts in order, then the shared expert's.
void ExpertsPart::add_results(const Step& step, const Piece& piece) const {
  const int64_t k = routing_.top_k;
  each_row(step.pool, Rows{0, piece.rows, false}, k * values_, [&](int64_t row) {
    float* to = piece.y + row * values_;
    std::fill_n(to, values_, 0.0f);
    const auto add = [&](const float* from, float weight) {
      for (int64_t c = 0; c < values_; ++c) to[c] += weight * from[c];
    };
    for (int64_t i = row * k; i < (row + 1) * k; ++i) {
      add(piece.results + piece.slot_of[i] * values_, piece.chosen[i].weight);
    }
    if (!piece.shared) return;
    float weight = 1;
    if (has_gate()) {
      weight = piece.logits[row * router_outputs() + count()];
      step.kernels.sigmoid(&weight, 1);
    }
    add(piece.shared + row * values_, weight);
  });
}

void ExpertsPart::together(const Step& step, const Rows& rows, const float* x, float* y) const {
  for (int64_t row = 0; row < rows.count; row += kMostGroupRows) {
    Piece piece{};
    piece.rows = std::min(kMostGroupRows, rows.count - row);
    piece.slots = piece.rows * routing_.top_k;
    piece.x = x + row * values_;
    piece.y = y + row * values_;
    route(step, piece);
    choose(step, piece);
    assign_slots(step, piece);
    encode_inputs(step, piece);
    compute_experts(step, piece);
    add_results(step, piece);
  }
}

}  // namespace pdserve
