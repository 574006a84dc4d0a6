// A linear product spread over the threads of the pool. The arithmetic is in linear*.inl.
//
// How the work is divided never changes a result: each output is computed whole by one thread.
#pragma once
#include "threads/pool.h"
#include "dispatch/table.h"

namespace pdserve {

// The mask of encodings (activations.h) that weights of this layout read.
uint32_t encoding_of(const Matrix& m);

// Bytes of the encodings of x, and how they divide a buffer of that size: sets x.int8 and x.bf16.
int64_t encoding_bytes(const Activations& x);
void place(Activations& x, void* buffer);

// The rows [begin, begin + count) of x, in all its encodings.
Activations rows_of(Activations x, int64_t begin, int64_t count);

// Copies a row's encodings, not its floats; both have the same needs.
void copy_encodings(const Activations& from, int64_t from_row, const Activations& to,
                    int64_t to_row);

// Encodes all rows of x; x.needs names the encodings, `place` gave them memory.
void run_encode(Pool& pool, const Kernels& kernels, const Activations& x);

int64_t total_tiles(const Matrix* const* matrices, int count);

// On this thread: outputs of the tiles [begin, end), counted through all matrices. See run_linear.
void linear_here(const Kernels& kernels, const Matrix* const* matrices, int count,
                 const Activations& x, int64_t begin, int64_t end, float* y, int64_t stride,
                 const float* bias);

// y[row * stride + o] = x times the matrices one below the other, plus bias [sum of rows] unless
// null. The matrices have x.cols columns; x is encoded for each of them.
void run_linear(Pool& pool, const Kernels& kernels, const Matrix* const* matrices, int count,
                const Activations& x, float* y, int64_t stride, const float* bias);

}  // namespace pdserve
