// The kernels of one instruction set, as a table of functions; `targets.h` lists the tables.
//
// Every function computes a range of independent pieces on the calling thread. A piece's result
// depends only on its inputs, never on the range, the thread or other pieces.
#pragma once
#include "linear/activations.h"
#include "attention/attend.h"
#include "linear/matrix.h"
#include "sampling/sampling.h"

namespace pdserve {

// The last is for gates only.
enum class Activation : int { kSilu, kGeluTanh, kGelu, kRelu2, kSwigluOai };

// The numbers of an xIELU activation.
struct Xielu {
  float a = 0, b = 0, beta = 0, eps = 0;
};

struct Kernels {
  const char* isa;

  // --- linear: encode.inl, linear*.inl
  // Encodes rows [begin, end) of x.f32 in the encodings that x.needs names.
  void (*encode)(const Activations& x, int64_t begin, int64_t end);
  // Computes y[row * stride + output] for every row of x and the outputs of tiles [begin, end) of
  // m.
  void (*linear)(const Matrix& m, const Activations& x, float* y, int64_t stride, int64_t begin,
                 int64_t end);
  // Writes the weights of output `row` of m as floats: out[m.cols].
  void (*matrix_row)(const Matrix& m, int64_t row, float* out);

  // --- decoder: elementwise.inl; one row per call
  // sum = x + residual (residual may be null), y = sum / rms(sum) * weight; sum or y may be null.
  void (*rms_norm)(const float* x, const float* residual, const float* weight, float eps,
                   int64_t cols, float* sum, float* y);
  // y = (x - mean) / deviation * weight + bias; bias may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps,
                     int64_t cols, float* y);
  // y[i] = activation(gate[i]) * up[i]; y[i] = activation(x[i]); y[i] = xIELU(x[i]).
  void (*gated)(const float* gate, const float* up, Activation kind, int64_t cols, float* y);
  void (*activated)(const float* x, Activation kind, int64_t cols, float* y);
  void (*xielu)(const float* x, const Xielu& curve, int64_t cols, float* y);
  // y[i] = 1 / (1 + e^-y[i]); y[i] = e^y[i]: in place.
  void (*sigmoid)(float* y, int64_t cols);
  void (*exponential)(float* y, int64_t cols);
  // Rotates the first 2 * half dims of each of `heads` consecutive heads in place.
  void (*rope)(float* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim,
               int64_t half);
  // y[i] = x[i] + bias[i]; y = x * scale; y = cap * tanh(x / cap): in place.
  void (*add_bias)(float* y, const float* bias, int64_t cols);
  void (*scale)(float* y, float factor, int64_t cols);
  void (*soft_cap)(float* y, float cap, int64_t cols);

  // --- attention: kv.inl, attend*.inl
  void (*store_kv)(const KvLayer& kv, int64_t slot, const float* k, const float* v);
  // Computes all queries of the task. scratch: attend_scratch(task) floats, aligned to 64 bytes
  // like `states` below.
  void (*attend)(const Attend& task, float* scratch);
  int64_t (*attend_scratch)(const Attend& task);
  // The same in steps, in any order and on any thread: attend_tiles writes tiles [begin, end) into
  // states[tile_floats(task)] each; then attend_merge computes the outputs from all states in
  // order.
  void (*attend_tiles)(const Attend& task, int64_t begin, int64_t end, float* states,
                       float* scratch);
  void (*attend_merge)(const Attend& task, const float* states, float* scratch);

  // --- sampling: sampling.inl; one row per call, count >= 1
  // Returns the index of the largest score; ties go to the lowest index; the first NaN if any.
  int64_t (*argmax)(const float* scores, int64_t count);
  // Returns the argmax of scores / temperature + Gumbel noise over the tokens with scores /
  // temperature >= floor. The scores are finite or -inf; the best is finite.
  int64_t (*gumbel_argmax)(const float* scores, float temperature, float floor,
                           const NoiseKey& key, int64_t count);
  // Copies the scores of the tokens whose bit is set (bit id % 32 of word id / 32); writes -inf for
  // the others.
  void (*apply_bitmask)(const float* scores, const uint32_t* mask, int64_t count, float* out);
  // Computes the Gumbel noise of some ids, defined in kernels/reference/sampling.py.
  void (*gumbel_at)(const NoiseKey& key, const int64_t* ids, int64_t count, float* out);
  // Returns the lowest scores / temperature that the filter keeps, at most the best. Scores as
  // above.
  float (*filter_floor)(const float* scores, float temperature, const Filter& filter,
                        int64_t count, float* scratch);
  // Returns the k-th largest score, 1 <= k <= count.
  float (*kth_score)(const float* scores, int64_t k, int64_t count, float* scratch);
  int64_t (*filter_scratch)(int64_t count);  // floats, for filter_floor and kth_score
  double (*log_sum_exp)(const float* scores, int64_t count);
};

}  // namespace pdserve
