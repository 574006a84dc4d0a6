// Memory for packed weights: pieces of large chunks of huge pages, one behind the other.
//
// Small matrices share pages of 2 MiB, so that reading a whole model misses few address
// translations, and matrices lie in the order in which they were packed. A chunk is unmapped when
// the last matrix in it is gone.
#pragma once
#include <cstdint>
#include <memory>

namespace pdserve {

// `bytes` of 64-byte aligned zeros; physical memory is used when they are written. Throws
// std::bad_alloc. Any thread may call.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

}  // namespace pdserve
