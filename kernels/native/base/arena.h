// Memory for packed weights, allocated consecutively from large chunks of huge pages.
//
// Small matrices share pages of 2 MiB, so that reading a model causes few TLB misses, and matrices
// are stored in the order of packing. A chunk is unmapped when its last matrix is destroyed.
#pragma once
#include <cstdint>
#include <memory>

namespace pdserve {

// Allocates `bytes` of zeros, aligned to 64 bytes; physical memory is used at the first write.
// Throws std::bad_alloc. Thread-safe.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

}  // namespace pdserve
