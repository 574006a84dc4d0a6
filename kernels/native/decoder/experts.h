// A mixture of experts: the content of a row chooses the gated products that it goes through.
//
// Rows are gathered by expert, so that an expert's weights are read once for many rows, and the
// tiles of all experts are divided over the threads at once. The results of a row are added in the
// order of the experts, so a row's result depends on that row alone.
#pragma once
#include <vector>

#include "decoder/part.h"
#include "linear/matrix.h"

namespace pdserve {

// How experts are chosen and weighted: engine/models/parts.py.
struct Routing {
  int64_t top_k = 1;
  bool sigmoid = false;  // scores are the sigmoid of the logits; otherwise their softmax
  bool normalized = false;
  float scale = 1;
  int64_t groups = 1, kept_groups = 1, group_best = 1;
};

// Throws std::invalid_argument if the routing is impossible with this number of experts.
void check_routing(const Routing& routing, int64_t experts);

struct Choice {
  int64_t expert;
  float weight;
};

// Returns the number of scratch floats for choose_experts.
inline int64_t choosing_floats(const Routing& routing, int64_t experts) {
  return 3 * experts + 2 * routing.groups;
}

// Chooses the top_k distinct experts of one row, best first, by its router logits [experts];
// correction is [experts] or null.
void choose_experts(const Kernels& kernels, const Routing& routing, int64_t experts,
                    const float* logits, const float* correction, float* scratch, Choice* chosen);

// down(activation(gate x) * up x); each product adds a bias unless it is empty.
struct Expert {
  Matrix gate, up, down;
  std::vector<float> gate_up_bias, down_bias;
};

class ExpertsPart : public Part {
 public:
  static constexpr const char* kKind = "experts";
  // router: [experts, values], followed by the shared expert's gate [1, values] if it has one.
  // bias, correction: [experts] or empty; the bias is added to the router's results. shared: at
  // most one expert, which every row goes to. Throws std::invalid_argument if the sizes do not
  // match.
  ExpertsPart(std::vector<Matrix> router, std::vector<float> bias, std::vector<float> correction,
              std::vector<Expert> experts, std::vector<Expert> shared, Routing routing,
              Activation activation);

  const char* kind() const override { return kKind; }
  Writes writes() const override { return Writes::kElsewhere; }
  int64_t fit(int64_t inputs) override;
  void row(const Step&, const Rows&, int64_t, const float*, float*) const override {}
  bool ends_pass() const override { return true; }
  bool wants_all_rows() const override { return true; }
  void together(const Step& step, const Rows& rows, const float* x, float* y) const override;

 private:
  // Some rows x, their results y, and intermediate data in the step's scratch memory. A slot is a
  // row at one of its experts; slots are ordered by expert, then by row.
  struct Piece {
    int64_t rows, slots;
    const float* x;
    float* y;
    float* logits = nullptr;          // [rows, router outputs]
    Choice* chosen = nullptr;         // [rows, top_k], ordered by expert
    int64_t* begins = nullptr;        // [experts + 1]: the first slot of each expert
    int64_t* slot_of = nullptr;       // [rows, top_k]
    int64_t* row_of = nullptr;        // [slots]
    Activations all{}, in{};          // inputs of rows and of slots
    const float* results = nullptr;   // [slots, values]
    const float* shared = nullptr;    // [rows, values], or null
  };

  int64_t count() const { return static_cast<int64_t>(experts_.size()); }
  bool has_gate() const { return router_.size() == 2; }
  int64_t router_outputs() const { return count() + has_gate(); }

  void route(const Step& step, Piece& piece) const;
  void choose(const Step& step, Piece& piece) const;
  void assign_slots(const Step& step, Piece& piece) const;
  void encode_inputs(const Step& step, Piece& piece) const;
  void compute_experts(const Step& step, Piece& piece) const;
  void add_results(const Step& step, const Piece& piece) const;
  // Sends slots [begins[e], begins[e + 1]) of `in` through expert e into results[slot].
  void compute(const Step& step, const std::vector<Expert>& experts, uint32_t middle_needs,
               const int64_t* begins, const Activations& in, float* results) const;

  std::vector<Matrix> router_;
  std::vector<float> bias_;  // of all routers
  std::vector<float> correction_;
  std::vector<Expert> experts_, shared_;
  Routing routing_;
  Activation activation_;
  int64_t values_ = 0;
  uint32_t needs_ = kFloat;      // encodings of inputs
  bool reads_floats_ = false;    // gate and up products read unencoded floats
  uint32_t middle_needs_ = kFloat, shared_middle_needs_ = kFloat;  // of the inputs of `down`
};

}  // namespace pdserve
