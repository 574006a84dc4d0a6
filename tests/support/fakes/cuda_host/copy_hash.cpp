// kernels/cuda/copy_hash.cu on the host, for ctypes. Returns whether the host and other devices see
// what it has written: a fence said so.
#include "cuda_host.h"

#include "copy_hash.cu"

extern "C" unsigned copy_hash_on_host(const unsigned* blocks, unsigned num_blocks_of_threads,
                                      unsigned reverse, unsigned fences, u64 base,
                                      u64 layer_bytes, u64 block_bytes, u32 first_layer,
                                      u32 num_blocks, u64 slot, u32 num_units, u32 to_slot,
                                      u64 plan_at, u64 scratch_at, u64 tag_at, u64 verdict_at) {
  std::vector<unsigned> order(blocks, blocks + num_blocks_of_threads);
  cuda_host::working_fences = fences;
  cuda_host::system_fenced = false;
  Scratch* scratch = reinterpret_cast<Scratch*>(scratch_at);
  cuda_host::watch(scratch->shares, num_blocks_of_threads * sizeof scratch->shares[0]);
  cuda_host::launch(order, kThreads, reverse != 0, [=] {
    copy_hash_kernel(base, layer_bytes, block_bytes, first_layer, num_blocks, slot, num_units,
                     to_slot, plan_at, scratch_at, tag_at, verdict_at);
  });
  return cuda_host::system_fenced;
}
