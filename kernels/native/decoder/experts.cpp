#include "decoder/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "decoder/groups.h"

namespace pdserve {
namespace {

constexpr int64_t kMostRows = 256;       // in one piece: bounds the scratch
constexpr int64_t kMostExperts = 4096;
constexpr float kLeastSum = 1e-20f;      // what normalized weights are divided by at least

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

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

// Index of the largest rank that is not taken, of equal ones the first; NaN is below all others.
int64_t best_of(const float* ranks, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (taken && taken[i]) continue;
    if (best < 0 || ranks[i] > ranks[best] || (std::isnan(ranks[best]) && !std::isnan(ranks[i]))) {
      best = i;
    }
  }
  return best;
}

// The sum of a group's best values.
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
  require(experts <= kMostExperts, "more than " + std::to_string(kMostExperts) + " experts");
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
  float *scores = scratch, *ranks = scratch + experts, *qualities = ranks + experts;
  scores_of(kernels, routing, experts, logits, scores);
  for (int64_t i = 0; i < experts; ++i) ranks[i] = scores[i] + (correction ? correction[i] : 0);
  bool taken[kMostExperts] = {};
  if (routing.groups > 1) {
    const int64_t size = experts / routing.groups;
    bool kept[kMostExperts] = {};
    for (int64_t g = 0; g < routing.groups; ++g) {
      qualities[g] = quality(ranks + g * size, size, routing.group_best);
    }
    for (int64_t n = 0; n < routing.kept_groups; ++n) {
      kept[best_of(qualities, kept, routing.groups)] = true;
    }
    for (int64_t i = 0; i < experts; ++i) taken[i] = !kept[i / size];
  }
  float sum = 0;
  for (int64_t k = 0; k < routing.top_k; ++k) {
    const int64_t best = best_of(ranks, taken, experts);
    chosen[k] = {best, scores[best]};
    sum += scores[best];
    taken[best] = true;
  }
  for (int64_t k = 0; k < routing.top_k; ++k) {
    if (routing.normalized) chosen[k].weight /= sum + kLeastSum;
    chosen[k].weight *= routing.scale;
  }
}

struct ExpertsPart::Scratch {
  Buffer<float> logits, choosing, inputs, products, middles, results, shared;
  Buffer<uint8_t> rows, slots, middle;  // encodings
  Buffer<Choice> chosen;
  Buffer<int64_t> begins, slot_of, row_of;
};

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
}

int64_t ExpertsPart::fit(int64_t inputs) {
  require(inputs == values_, "inputs of " + std::to_string(values_) + ", not " +
                                 std::to_string(inputs));
  return inputs;
}

int64_t ExpertsPart::products() const {
  const auto cost = [&](const Expert& expert) { return 3 * expert.gate.rows * values_; };
  const auto count = static_cast<int64_t>(experts_.size());
  return values_ * count + routing_.top_k * cost(experts_[0]) +
         (shared_.empty() ? 0 : cost(shared_[0]));
}

namespace {

// What the first products of the experts read: the mask of encodings, and whether some of them
// read the floats themselves.
struct Reads {
  uint32_t needs = kFloat;
  bool floats = false;
};

void note(const std::vector<Expert>& experts, Reads& reads) {
  for (const Expert& expert : experts) {
    for (const Matrix* matrix : {&expert.gate, &expert.up}) {
      reads.needs |= encoding_of(*matrix);
      reads.floats |= encoding_of(*matrix) == kFloat;
    }
  }
}

}  // namespace

void ExpertsPart::compute(const Step& step, const std::vector<Expert>& experts,
                          const int64_t* begins, const Activations& in, Scratch& scratch,
                          float* results) const {
  const int64_t slots = in.rows, size = experts[0].gate.rows;
  uint32_t needs = kFloat;
  for (const Expert& expert : experts) needs |= encoding_of(expert.down);
  float* products = scratch.products.at_least(slots * 2 * size);
  float* middles = scratch.middles.at_least(slots * size);
  const Activations middle = activations_of(slots, size, needs, middles, scratch.middle);
  multiply_groups(
      step, experts.size(), begins, in, products, 2 * size,
      [&](size_t e) { return std::array<const Matrix*, 2>{&experts[e].gate, &experts[e].up}; },
      [&](size_t e) -> const std::vector<float>& { return experts[e].gate_up_bias; });
  spread_rows(step.pool, slots, size, [&](int64_t slot) {
    const float* gate = products + slot * 2 * size;
    step.kernels.gated(gate, gate + size, activation_, size, middles + slot * size);
    step.kernels.encode(middle, slot, slot + 1);
  });
  multiply_groups(
      step, experts.size(), begins, middle, results, values_,
      [&](size_t e) { return std::array<const Matrix*, 1>{&experts[e].down}; },
      [&](size_t e) -> const std::vector<float>& { return experts[e].down_bias; });
}

void ExpertsPart::piece(const Step& step, int64_t rows, const float* x, float* y,
                        Scratch& scratch) const {
  const auto experts = static_cast<int64_t>(experts_.size());
  const int64_t k = routing_.top_k, slots = rows * k;

  // What the router says.
  const bool has_gate = router_.size() == 2;
  const int64_t outputs = experts + has_gate;
  const Matrix* routers[] = {&router_.front(), &router_.back()};
  float* logits = scratch.logits.at_least(rows * outputs);
  Activations plain;
  plain.rows = rows;
  plain.cols = values_;
  plain.f32 = x;
  run_linear(step.pool, step.kernels, routers, has_gate ? 2 : 1, plain, logits, outputs,
             bias_.empty() ? nullptr : bias_.data());

  // Each row's choices in the order of the experts. A slot is a row at one of its experts; slots
  // are in the order of experts, then of rows.
  float* choosing = scratch.choosing.at_least(2 * experts + routing_.groups);
  Choice* chosen = scratch.chosen.at_least(slots);
  int64_t* begins = scratch.begins.at_least(2 * experts + 1);
  int64_t* next = begins + experts + 1;
  int64_t* slot_of = scratch.slot_of.at_least(slots);
  int64_t* row_of = scratch.row_of.at_least(slots);
  std::fill_n(begins, experts + 1, 0);
  for (int64_t row = 0; row < rows; ++row) {
    Choice* own = chosen + row * k;
    choose_experts(step.kernels, routing_, experts, logits + row * outputs,
                   correction_.empty() ? nullptr : correction_.data(), choosing, own);
    std::sort(own, own + k, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
    for (int64_t i = 0; i < k; ++i) ++begins[own[i].expert + 1];
  }
  std::partial_sum(begins, begins + experts + 1, begins);
  std::copy_n(begins, experts, next);
  for (int64_t i = 0; i < slots; ++i) {
    slot_of[i] = next[chosen[i].expert]++;
    row_of[slot_of[i]] = i / k;
  }

  // Rows are encoded once, and copied to their slots.
  Reads reads;
  note(experts_, reads);
  note(shared_, reads);
  const Activations all = activations_of(rows, values_, reads.needs, x, scratch.rows);
  spread_rows(step.pool, rows, values_, [&](int64_t row) { step.kernels.encode(all, row, row + 1); });
  float* inputs = reads.floats ? scratch.inputs.at_least(slots * values_) : nullptr;
  const Activations in = activations_of(slots, values_, reads.needs, inputs, scratch.slots);
  spread_rows(step.pool, slots, values_, [&](int64_t slot) {
    if (inputs) std::copy_n(x + row_of[slot] * values_, values_, inputs + slot * values_);
    copy_encodings(all, row_of[slot], in, slot);
  });

  float* results = scratch.results.at_least(slots * values_);
  compute(step, experts_, begins, in, scratch, results);
  float* shared = nullptr;
  if (!shared_.empty()) {
    shared = scratch.shared.at_least(rows * values_);
    const int64_t whole[] = {0, rows};
    compute(step, shared_, whole, all, scratch, shared);
  }
  spread_rows(step.pool, rows, k * values_, [&](int64_t row) {
    float* to = y + row * values_;
    std::fill_n(to, values_, 0.0f);
    const auto add = [&](const float* from, float weight) {
      for (int64_t c = 0; c < values_; ++c) to[c] += weight * from[c];
    };
    for (int64_t i = row * k; i < (row + 1) * k; ++i) {
      add(results + slot_of[i] * values_, chosen[i].weight);
    }
    if (!shared) return;
    float weight = 1;
    if (has_gate) {
      weight = logits[row * outputs + experts];
      step.kernels.sigmoid(&weight, 1);
    }
    add(shared + row * values_, weight);
  });
}

void ExpertsPart::together(const Step& step, const Rows& rows, const float* x, float* y) const {
  static thread_local Scratch scratch;  // of whoever runs steps
  for (int64_t row = 0; row < rows.count; row += kMostRows) {
    piece(step, std::min(kMostRows, rows.count - row), x + row * values_, y + row * values_,
          scratch);
  }
}

}  // namespace pdserve
