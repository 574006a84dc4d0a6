// A linear product divided over the threads of the pool. The arithmetic is in linear*.inl.
//
// The division never affects a result, because one thread computes all of an output.
#pragma once
#include "threads/pool.h"
#include "dispatch/table.h"

namespace pdserve {

// Returns the mask of encodings (activations.h) that products with the matrix read.
uint32_t encoding_of(const Matrix& m);

// Returns the bytes of the encodings of x; `place` sets x.int8 and x.bf16 in a buffer of that size.
int64_t encoding_bytes(const Activations& x);
void place(Activations& x, void* buffer);

// Returns the rows [begin, begin + count) of x, in all its encodings.
Activations rows_of(Activations x, int64_t begin, int64_t count);

// Copies a row's encodings, but not its floats; both must have the same needs.
void copy_encodings(const Activations& from, int64_t from_row, const Activations& to,
                    int64_t to_row);

// Encodes all rows of x in the encodings of x.needs; call `place` first.
void run_encode(Pool& pool, const Kernels& kernels, const Activations& x);

int64_t total_tiles(const Matrix* const* matrices, int count);

// Computes on this thread the outputs of tiles [begin, end), numbered over all matrices, like
// run_linear.
void linear_here(const Kernels& kernels, const Matrix* const* matrices, int count,
                 const Activations& x, int64_t begin, int64_t end, float* y, int64_t stride,
                 const float* bias);

// Computes y[row * stride + o] = x times the stacked matrices, plus bias [sum of rows] unless null.
// The matrices have x.cols columns; x is encoded for each of them.
void run_linear(Pool& pool, const Kernels& kernels, const Matrix* const* matrices, int count,
                const Activations& x, float* y, int64_t stride, const float* bias);

}  // namespace pdserve
