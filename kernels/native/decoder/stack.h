// A stack of decoder layers over a paged KV cache: a whole step in one call.
//
// Each layer is a list of parts (parts.h). The lists are handed over once, at load, and a step runs
// the plan that is made of them (plan.h). The residual stream is float32. Owns its weights and its
// buffers, not the pool's memory. One caller at a time.
#pragma once
#include <deque>
#include <optional>

#include "base/buffer.h"
#include "decoder/groups.h"
#include "decoder/plan.h"

namespace pdserve {

class Stack {
 public:
  Stack(Pool& pool, const Kernels& kernels, int64_t hidden, float embed_scale,
        float logit_scale, float logit_soft_cap)
      : pool_(pool),
        kernels_(kernels),
        hidden_(hidden),
        embed_scale_(embed_scale),
        logit_scale_(logit_scale),
        logit_soft_cap_(logit_soft_cap) {}

  int64_t hidden() const { return hidden_; }

  Matrix embedding;             // [vocabulary, hidden]
  std::deque<RopeTable> ropes;  // a deque: parts refer to tables

  // Throws std::invalid_argument with the part that does not fit.
  void add_layer(Parts parts);
  // The norm behind the last layer and the product that makes logits; then the stack is complete.
  void set_head(std::unique_ptr<Part> norm, LinearPart head);
  bool complete() const { return head_.has_value(); }
  int64_t vocabulary() const { return head_->outputs(); }

  // Of every layer, in order; their `kv` is set before the first step.
  const std::vector<AttentionPart*>& attentions() const { return attentions_; }

  // Writes the tokens' keys and values and hidden [num_outputs, hidden], after the last norm.
  void forward(const StepBatch& batch, float* hidden);
  // How many threads took rows of their own through all layers in the last step; 0: the threads
  // shared every operation.
  int64_t shares() const { return shares_; }
  // logits [rows, vocabulary] of such hidden states.
  void logits(const float* hidden, int64_t rows, float* logits);

 private:
  // Rows of one size, one for each token of a step. `at` is set at the beginning of a step.
  struct Place {
    int64_t width = 0;
    Buffer<float> memory;  // none for the place of the step's result, which is the caller's
    float* at = nullptr;

    float* row(int64_t n) const { return at + n * width; }
  };

  Step begin_step(const StepBatch& batch, float* hidden);
  void embed(const Step& step);
  void run_all(const Segment& segment, const Step& step);
  void run(const Segment& segment, const Step& step, const Rows& rows);
  AttentionBatch attention_of(const Segment& segment, const StepBatch& batch) const;
  void plan_attention(const StepBatch& batch);
  std::vector<int64_t> cut(const StepBatch& batch) const;
  void keep_outputs(Step& step, Place& attended);

  Pool& pool_;
  const Kernels& kernels_;
  int64_t hidden_;
  float embed_scale_, logit_scale_, logit_soft_cap_;
  std::vector<Parts> layers_;
  std::vector<AttentionPart*> attentions_;
  std::unique_ptr<Part> norm_;
  std::optional<LinearPart> head_;
  Plan plan_;
  int64_t rows_ = 0;  // of the stream now: all tokens, or the outputs' only
  std::vector<Place> places_;
  Buffer<float> spare_[2];  // changes places with what `keep_outputs` keeps
  Buffer<uint8_t> encodings_;
  GroupScratch scratch_;
  int64_t shares_ = 0;
  std::vector<Attention> cuts_;  // how each group's attention is cut for this step
};

}  // namespace pdserve
