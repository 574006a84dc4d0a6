// A stack of decoder layers over a paged KV cache: a whole step in one call.
//
// Each layer is a list of parts (parts.h). The lists are passed once, at load, and a step runs the
// plan built from them (plan.h). The residual stream is float32. Owns its weights and buffers, but
// not the pool's memory. Only one thread at a time may call it.
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
  std::deque<RopeTable> ropes;  // a deque, because parts refer to its tables

  // Throws std::invalid_argument that names the unsuitable part.
  void add_layer(Parts parts);
  // Sets the final norm and the product that computes logits; this completes the stack.
  void set_head(std::unique_ptr<Part> norm, LinearPart head);
  bool complete() const { return head_.has_value(); }
  int64_t vocabulary() const { return head_->outputs(); }
  // Number of positions in the smallest table of positions; a token's position must be less.
  int64_t positions() const { return plan_.positions; }

  // Returns the attention of every layer, in order; set their `kv` before the first step.
  const std::vector<AttentionPart*>& attentions() const { return attentions_; }

  // Writes the tokens' keys and values and hidden [num_outputs, hidden], after the last norm.
  void forward(const StepBatch& batch, float* hidden);
  // Number of threads that took separate rows through all layers in the last step; 0: the threads
  // shared every operation.
  int64_t shares() const { return shares_; }
  // Writes logits [rows, vocabulary] of hidden states that `forward` returned.
  void logits(const float* hidden, int64_t rows, float* logits);

 private:
  // Rows of one size, one per token of a step. `at` is set at the beginning of a step.
  struct Place {
    int64_t width = 0;
    Buffer<float> memory;  // unused for the step's result, whose memory belongs to the caller
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
  int64_t rows_ = 0;  // current rows of the stream: all tokens, or only the outputs
  std::vector<Place> places_;
  Buffer<float> spare_[2];  // swapped with the memory of the rows that `keep_outputs` keeps
  Buffer<uint8_t> encodings_;
  GroupScratch scratch_;
  int64_t shares_ = 0;
  std::vector<Attention> cuts_;  // division of each group's attention for this step
};

}  // namespace pdserve
