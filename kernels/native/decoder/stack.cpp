#include "decoder/stack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace pdserve {
namespace {

// Rows that one thread takes through some parts: fewer rows read the weights too often, more exceed
// the second-level cache.
constexpr int64_t kFewestAlone = 32, kMostAlone = 128;
// Decode rows that a thread takes through all layers: fewer rows read the weights too often.
constexpr int64_t kFewestShare = 16;
constexpr double kUneven = 1.1;  // maximum cost of a share relative to the mean

void fit(Part& part, const char* name, int64_t inputs) {
  try {
    part.fit(inputs);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(name) + ": " + error.what());
  }
}

}  // namespace

void Stack::add_layer(Parts parts) {
  if (complete()) throw std::invalid_argument("layers come before the head");
  check_layer(parts, hidden_, layers_.size());
  for (std::unique_ptr<Part>& part : parts) {
    auto* attention = dynamic_cast<AttentionPart*>(part.get());
    if (!attention) continue;
    for (const AttentionPart* other : attentions_) {
      if (other->group == attention->group && !other->planned_like(*attention)) {
        throw std::invalid_argument("layer " + std::to_string(layers_.size()) +
                                    " (attention): other heads or another window than the layers "
                                    "before it of group " + std::to_string(other->group));
      }
    }
    attentions_.push_back(attention);
  }
  layers_.push_back(std::move(parts));
}

void Stack::set_head(std::unique_ptr<Part> norm, LinearPart head) {
  if (complete()) throw std::invalid_argument("the head is set already");
  if (layers_.empty()) throw std::invalid_argument("the head comes after the layers");
  if (!dynamic_cast<NormPart*>(norm.get()) && !dynamic_cast<LayerNormPart*>(norm.get())) {
    throw std::invalid_argument(std::string("the last norm: ") + norm->kind() + " is none");
  }
  fit(*norm, "the last norm", hidden_);
  fit(head, "the head", hidden_);
  norm_ = std::move(norm);
  plan_ = make_plan(layers_, *norm_, hidden_);
  head_.emplace(std::move(head));
  places_ = std::vector<Place>(plan_.widths.size());
  for (size_t i = 0; i < places_.size(); ++i) places_[i].width = plan_.widths[i];
  cuts_ = std::vector<Attention>(plan_.groups.size());
}

// Runs a segment on all rows at once, or, if there are many, on some at a time on each thread.
void Stack::run_all(const Segment& segment, const Step& step) {
  const auto body = [&](const Rows& rows) { run(segment, step, rows); };
  const int64_t threads = pool_.threads();
  if (segment.all_rows || rows_ < kFewestAlone * threads) return body(Rows{0, rows_, false});
  const int64_t pieces = threads * ceil_div(rows_, threads * kMostAlone);
  const int64_t size = ceil_div(rows_, pieces);
  pool_.run(ceil_div(rows_, size), [&](int64_t piece, int) {
    body(Rows{piece * size, std::min(size, rows_ - piece * size), true});
  });
}

// Allocates the memory of all places before threads write to them; it stays until `keep_outputs`.
Step Stack::begin_step(const StepBatch& batch, float* hidden) {
  rows_ = batch.tokens;
  for (size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    place.at = i == kHiddenPlace ? hidden : place.memory.at_least(batch.tokens * place.width);
  }
  uint8_t* encodings = encodings_.at_least(batch.tokens * plan_.encoding_bytes);
  float* stream = places_[kStreamPlace].at;
  float* held = plan_.held ? places_[plan_.held].at : nullptr;
  return {pool_, kernels_, batch, stream, held, hidden_, encodings, plan_.encoding_bytes,
          scratch_};
}

void Stack::embed(const Step& step) {
  each_row(pool_, Rows{0, rows_, false}, hidden_, [&](int64_t token) {
    float* to = step.stream + token * hidden_;
    kernels_.matrix_row(embedding, step.batch.token_ids[token], to);
    if (embed_scale_ != 1) kernels_.scale(to, embed_scale_, hidden_);
    if (added.empty()) return;
    const float* more = added.data() + step.batch.added_ids[token] * hidden_;
    for (int64_t i = 0; i < hidden_; ++i) to[i] += more[i];
  });
}

// Runs all passes of a segment on some rows, without its attention.
void Stack::run(const Segment& segment, const Step& step, const Rows& rows) {
  for (const Pass& pass : segment.passes) {
    each_row(pool_, rows, pass.cols, [&](int64_t row) {
      for (const Op& op : pass.ops) {
        op.part->row(step, rows, row, places_[op.in].row(row), places_[op.out].row(row));
      }
    });
    const Op& last = pass.ops.back();
    last.part->together(step, rows, places_[last.in].row(rows.begin),
                        places_[last.out].row(rows.begin));
  }
}

AttentionBatch Stack::attention_of(const Segment& segment, const StepBatch& batch) const {
  const Op& op = segment.attend;
  return segment.attention->task(batch, places_[op.in].at, places_[op.out].at);
}

void Stack::plan_attention(const StepBatch& batch) {
  for (size_t g = 0; g < cuts_.size(); ++g) {
    const AttentionPart* first = plan_.groups[g];
    if (first) cuts_[g].plan(first->task(batch, nullptr, nullptr), kernels_, pool_.threads());
  }
}

// Divides decode rows so that each thread can take a share through all layers without waiting for
// other threads or reading their results. Returns the first row of each share, and the end; empty
// if there are too few rows or their contexts differ too much.
std::vector<int64_t> Stack::cut(const StepBatch& batch) const {
  const int64_t threads = pool_.threads();
  if (threads < 2 || batch.rows < kFewestShare * threads) return {};
  if (batch.tokens != batch.rows || batch.num_outputs == 0) return {};
  for (const Segment& segment : plan_.segments) {
    if (segment.all_rows) return {};
  }
  std::vector<int64_t> until{0};  // the cost of all preceding rows
  for (int64_t row = 0; row < batch.rows; ++row) {
    int64_t cost = plan_.products;
    for (size_t g = 0; g < cuts_.size(); ++g) {
      if (plan_.groups[g]) cost += plan_.tile_costs[g] * cuts_[g].cost(row);
    }
    until.push_back(until.back() + cost);
  }
  std::vector<int64_t> cuts{0};
  const double mean = static_cast<double>(until.back()) / static_cast<double>(threads);
  for (int64_t n = 1; n <= threads; ++n) {
    auto next = std::upper_bound(until.begin(), until.end(), static_cast<int64_t>(mean * n));
    cuts.push_back(n < threads ? next - until.begin() - 1 : batch.rows);
    if (until[cuts[n]] - until[cuts[n - 1]] > mean * kUneven) return {};
  }
  return cuts;
}

// Keeps, after the last attention, only the rows of output tokens, in the order of the outputs: the
// results of attention and the stream.
void Stack::keep_outputs(Step& step, Place& attended) {
  const StepBatch& batch = step.batch;
  Buffer<float>* spare = spare_;
  for (Place* place : {&attended, &places_[kStreamPlace]}) {
    float* kept = spare->at_least(batch.num_outputs * place->width);
    const size_t bytes = static_cast<size_t>(place->width) * sizeof(float);
    for (int64_t i = 0; i < batch.num_outputs; ++i) {
      std::memcpy(kept + i * place->width, place->row(batch.outputs[i]), bytes);
    }
    std::swap(place->memory, *spare++);
    place->at = kept;
  }
  step.stream = places_[kStreamPlace].at;
  rows_ = batch.num_outputs;
}

void Stack::forward(const StepBatch& batch, float* hidden) {
  Step step = begin_step(batch, hidden);
  embed(step);
  plan_attention(batch);
  const std::vector<int64_t> cuts = cut(batch);
  shares_ = cuts.empty() ? 0 : static_cast<int64_t>(cuts.size()) - 1;
  const size_t layers = plan_.segments.size() - 1;
  const auto cut_of = [&](const Segment& segment) -> Attention& {
    return cuts_[static_cast<size_t>(segment.attention->group)];
  };
  if (shares_) {
    pool_.run(shares_, [&](int64_t n, int worker) {
      const Rows rows{cuts[n], cuts[n + 1] - cuts[n], true};
      for (size_t i = 0; i < layers; ++i) {
        const Segment& segment = plan_.segments[i];
        run(segment, step, rows);
        cut_of(segment).run_rows(kernels_, attention_of(segment, batch), rows.begin,
                                 rows.begin + rows.count, worker);
      }
    });
  } else {
    for (size_t i = 0; i < layers; ++i) {
      const Segment& segment = plan_.segments[i];
      run_all(segment, step);
      if (i + 1 == layers && batch.num_outputs == 0) return;
      cut_of(segment).run(pool_, kernels_, attention_of(segment, batch));
    }
  }
  keep_outputs(step, places_[plan_.segments[layers - 1].attend.out]);
  run_all(plan_.segments.back(), step);
}

void Stack::logits(const float* hidden, int64_t rows, float* logits) {
  const LinearPart& head = *head_;
  const Rows all{0, rows, false};
  const int64_t row_bytes = head.encoding_bytes(), vocab = vocabulary();
  uint8_t* encodings = encodings_.at_least(rows * row_bytes);
  const StepBatch none;
  const Step step{pool_, kernels_, none, nullptr, nullptr, hidden_, encodings, row_bytes,
                  scratch_};
  each_row(pool_, all, hidden_, [&](int64_t row) {
    head.row(step, all, row, hidden + row * hidden_, nullptr);
  });
  head.together(step, all, hidden, logits);
  if (logit_scale_ == 1 && logit_soft_cap_ == 0) return;
  each_row(pool_, all, vocab, [&](int64_t row) {
    float* at = logits + row * vocab;
    if (logit_scale_ != 1) kernels_.scale(at, logit_scale_, vocab);
    if (logit_soft_cap_ != 0) kernels_.soft_cap(at, logit_soft_cap_, vocab);
  });
}

}  // namespace pdserve
