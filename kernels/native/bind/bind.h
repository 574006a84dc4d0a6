// Shared definitions of the binding files: array arguments and the context of every call.
//
// nanobind checks an array argument's dtype, dimensions and contiguity; `require` checks sizes that
// must agree and raises ValueError. The GIL is released while kernels run.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "attention/attend.h"
#include "base/require.h"
#include "dispatch/table.h"
#include "threads/pool.h"

namespace nb = nanobind;

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// A thread pool and the kernels that run on it.
struct Context {
  pdserve::Pool pool;
  const pdserve::Kernels& kernels;
};

using pdserve::require;

// An array argument without conversion: nanobind would otherwise pass a converted copy of an array
// of another dtype or order, and results written to the copy would be lost.
inline auto array(const char* name) { return nb::arg(name).noconvert(); }

// Allocates memory aligned to 64 bytes, owned by the result.
template <class T>
std::unique_ptr<T[], decltype(&std::free)> aligned(int64_t count) {
  size_t bytes = static_cast<size_t>(pdserve::round_up(count * sizeof(T) + 1, pdserve::kAlign));
  return {static_cast<T*>(std::aligned_alloc(pdserve::kAlign, bytes)), &std::free};
}

// Parses float32, bfloat16, float16 or int8. Throws std::invalid_argument for another name.
pdserve::KvType kv_type(const std::string& name);

// Returns a layer of these sizes over memory with blocks of `block_bytes`. Throws
// std::invalid_argument if a size is out of range or does not match the memory.
pdserve::KvLayer kv_layer(uint8_t* data, int64_t block_bytes, const std::string& type,
                          int64_t kv_heads, int64_t block_size, int64_t head_dim, int64_t latent);

void bind_context(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_elementwise(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_routing(nb::module_& m);
void bind_stack(nb::module_& m);
void bind_copy_hash(nb::module_& m);
void bind_copy_past_caches(nb::module_& m);
