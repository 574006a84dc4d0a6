// Memory for packed weights: taken one behind the other from chunks of huge pages.
//
// Small matrices share pages of 2 MiB, so that streaming through a model misses no address
// translations, and one packed after another lies behind it. A chunk is given back when the last of
// its users goes.
#pragma once
#include <cstdint>
#include <memory>

namespace pdserve {

// `bytes` of 64-byte aligned zeros; physical memory is used when they are written. Throws
// std::bad_alloc. Any thread may call.
std::shared_ptr<uint8_t> weight_memory(int64_t bytes);

}  // namespace pdserve
