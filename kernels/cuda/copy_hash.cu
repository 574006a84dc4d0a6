// The hashing copy on the GPU: one thread block per tile; the last block to finish adds the shares.
//
// A copy into a slot writes the tag to `tag` (behind the slot's payload). A copy out of a slot
// compares the stored tag with the tag of the copied bytes and writes the verdict to host memory.
// Compiled at run time by CuPy (kernels/cuda/copy_hash.py), and by nvcc in the tests.
#include "copy_hash.h"

using copy_hash::kLanes;
using copy_hash::kThreads;
using copy_hash::Lane;
using copy_hash::Pages;
using copy_hash::u32;
using copy_hash::u64;
using copy_hash::u8;

// The uploaded inputs of a launch; the block numbers follow as int.
struct Plan {
  Lane lanes[kLanes];
};

// Scratch memory of one slot, on the device; `ended` is 0 between launches.
struct Scratch {
  u32 ended;
  u32 unused[3];
  u64 shares[1][kLanes];  // [tiles][lanes]
};

constexpr u32 kIntact = 1, kDamaged = 2;

// Adds the values of all threads; only thread 0 gets the result.
static __device__ u64 sum_threads(u64 value, u64* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (u32 half = kThreads / 2; half; half /= 2) {
    if (threadIdx.x < half) {
      shared[threadIdx.x] = copy_hash::add(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
  }
  u64 sum = shared[0];
  __syncthreads();
  return sum;
}

extern "C" __global__ void __launch_bounds__(256)
    copy_hash_kernel(u64 base, u64 layer_bytes, u64 block_bytes, u32 first_layer, u32 num_blocks,
                     u64 slot, u32 num_units, u32 to_slot, u64 plan_at, u64 scratch_at, u64 tag_at,
                     u64 verdict_at) {
  __shared__ u64 shared[kThreads];
  __shared__ bool last;
  const Plan* plan = reinterpret_cast<const Plan*>(plan_at);
  Scratch* scratch = reinterpret_cast<Scratch*>(scratch_at);
  Pages pages = {reinterpret_cast<u8*>(base), layer_bytes, block_bytes, first_layer, num_blocks,
                 reinterpret_cast<const int*>(plan + 1)};

  u64 own[kLanes];
  copy_hash::copy_part(pages, reinterpret_cast<u8*>(slot), num_units, to_slot != 0, blockIdx.x,
                       threadIdx.x, plan->lanes, own);
  for (int lane = 0; lane < kLanes; ++lane) {
    u64 sum = sum_threads(own[lane], shared);
    if (threadIdx.x == 0) {
      scratch->shares[blockIdx.x][lane] =
          copy_hash::tile_share(plan->lanes[lane], sum, blockIdx.x);
    }
  }
  if (threadIdx.x == 0) {
    __threadfence();  // the share before the count
    last = atomicAdd(&scratch->ended, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;

  __threadfence();
  u64 tag[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    u64 some = 0;
    for (u32 tile = threadIdx.x; tile < gridDim.x; tile += kThreads) {
      some = copy_hash::add(some, *const_cast<volatile u64*>(&scratch->shares[tile][lane]));
    }
    u64 sum = sum_threads(some, shared);
    tag[lane] = copy_hash::finish(plan->lanes[lane], sum,
                                  static_cast<u64>(num_units) * copy_hash::kUnitBytes);
  }
  if (threadIdx.x) return;
  scratch->ended = 0;
  volatile u64* stored = reinterpret_cast<volatile u64*>(tag_at);
  if (to_slot) {
    for (int lane = 0; lane < kLanes; ++lane) stored[lane] = tag[lane];
    __threadfence_system();
    return;
  }
  bool intact = true;
  for (int lane = 0; lane < kLanes; ++lane) intact &= stored[lane] == tag[lane];
  *reinterpret_cast<volatile u32*>(verdict_at) = intact ? kIntact : kDamaged;
  __threadfence_system();
}
