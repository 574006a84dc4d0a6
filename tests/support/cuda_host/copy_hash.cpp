// kernels/cuda/copy_hash.cu on the host, for ctypes.
#include "cuda_host.h"

#include "copy_hash.cu"

extern "C" void copy_hash_on_host(const unsigned* blocks, unsigned num_blocks_of_threads,
                                  unsigned reverse, u64 base,
                                  u64 layer_bytes, u64 block_bytes, u32 first_layer,
                                  u32 num_blocks, u64 slot, u32 num_units, u32 to_slot,
                                  u64 plan_at, u64 scratch_at, u64 tag_at, u64 verdict_at) {
  std::vector<unsigned> order(blocks, blocks + num_blocks_of_threads);
  cuda_host::launch(order, kThreads, reverse != 0, [=] {
    copy_hash_kernel(base, layer_bytes, block_bytes, first_layer, num_blocks, slot, num_units,
                     to_slot, plan_at, scratch_at, tag_at, verdict_at);
  });
}
