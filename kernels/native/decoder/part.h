// The interface of the parts of a layer: functions of rows, run in the order of the layer's list.
//
// A row is one token of the step. Its value starts as the residual stream, and each part computes
// the next value. A row's result depends on that row alone, except in attention, which reads the
// keys and values that earlier tokens of the same sequence stored.
#pragma once
#include <algorithm>
#include <vector>

#include "dispatch/table.h"
#include "threads/pool.h"

namespace pdserve {

// The tables of one layer group for one step.
struct StepGroup {
  const int64_t* block_table = nullptr;  // [rows, width]
  int64_t width = 0;
  const int64_t* slots = nullptr;        // [tokens]
};

// A flat batch: row r has tokens [starts[r], starts[r + 1]); see engine/execution/runner.py.
struct StepBatch {
  int64_t tokens = 0;
  int64_t rows = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int64_t* added_ids = nullptr;  // rows of Stack::added; null if it is empty
  const int64_t* starts = nullptr;   // [rows + 1]
  const int64_t* kv_lens = nullptr;  // [rows]
  std::vector<StepGroup> groups;
  const int64_t* outputs = nullptr;  // [num_outputs] tokens whose hidden states are returned
  int64_t num_outputs = 0;           // 0: the last layer computes only keys and values
};

struct GroupScratch;

// The data of a step that parts use in addition to their rows.
struct Step {
  Pool& pool;
  const Kernels& kernels;
  const StepBatch& batch;
  float* stream;           // [rows, hidden]
  float* held;             // [rows, hidden], kept by a HoldPart; null if no layer has one
  int64_t hidden;
  uint8_t* encodings;      // [rows, encoding_bytes]: encoded inputs of products
  int64_t encoding_bytes;
  GroupScratch& scratch;   // of products in groups; one part at a time uses it
};

// Rows of the stream that go through parts together: all rows, with each operation spread over the
// threads; or some of many rows, which stay in one thread's cache from part to part.
struct Rows {
  int64_t begin, count;
  bool alone;  // computed on this thread only
};

constexpr int64_t kRowsPerPiece = 4;

// Calls body(begin, end) for ranges of rows with `values` values each: once for all if they are
// alone or too small to wake helpers for; else for kRowsPerPiece at a time.
template <class Body>
void each_range(Pool& pool, const Rows& rows, int64_t values, const Body& body) {
  constexpr int64_t kInline = 8192;  // values
  const int64_t end = rows.begin + rows.count;
  if (rows.alone || rows.count * values <= kInline) return body(rows.begin, end);
  pool.run(ceil_div(rows.count, kRowsPerPiece), [&](int64_t piece, int) {
    const int64_t first = rows.begin + piece * kRowsPerPiece;
    body(first, std::min(end, first + kRowsPerPiece));
  });
}

// Calls body(row) for every row.
template <class Body>
void each_row(Pool& pool, const Rows& rows, int64_t values, const Body& body) {
  each_range(pool, rows, values, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// The places to which a part may write its result.
enum class Writes {
  kInput,      // over its input, which must not be the stream
  kAnywhere,   // over its input, or elsewhere if its input is the stream
  kElsewhere,  // never over its input
  kStream,     // to the stream, which becomes the value; its input is not the stream
};

class Part {
 public:
  virtual ~Part() = default;

  // Returns the part's name in lists of parts and in errors.
  virtual const char* kind() const = 0;
  virtual Writes writes() const = 0;
  // Adapts the part to rows of `inputs` floats, at load; returns the floats of a result row. Throws
  // std::invalid_argument if it does not support such rows.
  virtual int64_t fit(int64_t inputs) = 0;

  // Takes over the work of the next part if one pass over a row can do both.
  virtual bool fuse(const Part&) { return false; }

  // Does the work on one row that needs no other rows: from x to y, or in preparation of
  // `together`. It follows directly after the previous parts' work on the same row.
  virtual void row(const Step& step, const Rows& rows, int64_t row, const float* x,
                   float* y) const = 0;
  // Returns whether some work needs several rows at once; then the part is the last of its pass.
  virtual bool ends_pass() const { return false; }
  // Does the work on rows that have all been through `row`; x and y point to the first of them.
  virtual void together(const Step&, const Rows&, const float*, float*) const {}

  // Returns whether separate rows per thread would cost more than all rows on all threads; then the
  // parts between two attentions run on all rows.
  virtual bool wants_all_rows() const { return false; }

  virtual int64_t encoding_bytes() const { return 0; }  // per row, for Step::encodings
  // Returns the cost of a row in multiplications. Not called for a part that wants all rows.
  virtual int64_t products() const { return 0; }
};

}  // namespace pdserve
