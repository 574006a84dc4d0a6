// What every part of a layer is: a function of rows, run in the order in which a layer lists it.
//
// A row is one token of the step. Its value begins as the residual stream, and each part makes the
// next value of it. A result for a row depends on that row alone, but for attention, which reads
// the keys and values that earlier tokens of the same sequence stored.
#pragma once
#include <algorithm>
#include <vector>

#include "dispatch/table.h"
#include "threads/pool.h"

namespace pdserve {

// One layer group's tables for one step.
struct StepGroup {
  const int64_t* block_table = nullptr;  // [rows, width]
  int64_t width = 0;
  const int64_t* slots = nullptr;        // [tokens]
};

// A flat batch: row r has tokens [starts[r], starts[r + 1]); see engine/execution/batch.py.
struct StepBatch {
  int64_t tokens = 0;
  int64_t rows = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int64_t* starts = nullptr;   // [rows + 1]
  const int64_t* kv_lens = nullptr;  // [rows]
  std::vector<StepGroup> groups;
  const int64_t* outputs = nullptr;  // [num_outputs] tokens whose hidden states are wanted
  int64_t num_outputs = 0;           // 0: of the last layer only keys and values are computed
};

struct GroupScratch;

// What parts see of a step beside their own rows.
struct Step {
  Pool& pool;
  const Kernels& kernels;
  const StepBatch& batch;
  float* stream;           // [rows, hidden]
  float* held;             // [rows, hidden], what a HoldPart keeps; null if no layer has one
  int64_t hidden;
  uint8_t* encodings;      // [rows, encoding_bytes], where inputs of products are encoded
  int64_t encoding_bytes;
  GroupScratch& scratch;   // of products in groups, which one part at a time computes
};

// Rows of the stream that go through parts together: all of them, each operation spread over the
// threads, or some of many, which stay in one thread's cache from part to part.
struct Rows {
  int64_t begin, count;
  bool alone;  // on this thread only
};

constexpr int64_t kRowsPerPiece = 4;

// body(begin, end) for rows of so many values: for all at once if they are alone, or if they are not
// worth waking helpers for; else for kRowsPerPiece at a time.
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

// body(row) for every row.
template <class Body>
void each_row(Pool& pool, const Rows& rows, int64_t values, const Body& body) {
  each_range(pool, rows, values, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// Where a part may write its result.
enum class Writes {
  kInput,      // over its input, which must not be the stream
  kAnywhere,   // over its input, but elsewhere if its input is the stream
  kElsewhere,  // never over its input
  kStream,     // to the stream, which is the value from there on; its input is not the stream
};

class Part {
 public:
  virtual ~Part() = default;

  // Its name in lists of parts and in errors.
  virtual const char* kind() const = 0;
  virtual Writes writes() const = 0;
  // Fits it to rows of `inputs` floats, at load; floats of a row of its result. Throws
  // std::invalid_argument if it cannot take such rows.
  virtual int64_t fit(int64_t inputs) = 0;

  // Takes over the work of the part behind it, if one pass over a row can do both.
  virtual bool fuse(const Part&) { return false; }

  // The work on one row, which other rows need not be ready for: from x to y, or as a preparation
  // for `together`. It comes right after the work of the parts before it on the same row.
  virtual void row(const Step& step, const Rows& rows, int64_t row, const float* x,
                   float* y) const = 0;
  // Whether there is work that needs several rows at once: then this part is the last of its pass.
  virtual bool ends_pass() const { return false; }
  // The work on rows that have all been through `row`; x and y are of the first of them.
  virtual void together(const Step&, const Rows&, const float*, float*) const {}

  // Whether rows in one thread's hands would cost more than all of them on all threads: then the
  // parts between two attentions are run on all rows.
  virtual bool wants_all_rows() const { return false; }

  virtual int64_t encoding_bytes() const { return 0; }  // of a row, for Step::encodings
  // Multiplications for a row: its cost. Nobody asks a part that wants all rows.
  virtual int64_t products() const { return 0; }
};

}  // namespace pdserve
