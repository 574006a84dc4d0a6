#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

#include "base/common.h"

namespace pdserve {

namespace {

constexpr int64_t kPage = int64_t{2} << 20;
constexpr int64_t kChunk = int64_t{64} << 20;

struct Chunk {
  explicit Chunk(int64_t bytes) : mapped(bytes + kPage) {
    void* at = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    memory = static_cast<uint8_t*>(at);
    const auto address = reinterpret_cast<uintptr_t>(at);
    begin = memory + (round_up(address, kPage) - address);
    end = begin + bytes;
    madvise(begin, bytes, MADV_HUGEPAGE);  // advice only: small pages also work
  }
  ~Chunk() { munmap(memory, mapped); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  int64_t mapped;
  uint8_t* memory;
  uint8_t* begin;  // the first free byte
  uint8_t* end;
};

}  // namespace

std::shared_ptr<uint8_t> weight_memory(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Chunk> current;  // owned by the matrices in it
  bytes = round_up(std::max<int64_t>(bytes, 1), kAlign);
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = current.lock();
  if (!chunk || chunk->end - chunk->begin < bytes) {
    chunk = std::make_shared<Chunk>(std::max(round_up(bytes, kPage), kChunk));
    current = chunk;
  }
  uint8_t* taken = chunk->begin;
  chunk->begin += bytes;
  return {chunk, taken};
}

}  // namespace pdserve
