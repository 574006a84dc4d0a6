// Runs a CUDA kernel on the host, for tests: each thread of a block is a fiber, and a barrier
// switches to the next one. Blocks run one after another, in an order that the test gives.
//
// What a block writes into watched memory is visible to other blocks when the block has fenced it,
// at the latest when the kernel has ended. Only writes are late; a read that a fence should hold back
// is not modelled.
//
// A barrier that only some threads of a block reach, or that a thread has ended before, aborts.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

constexpr size_t kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool ended = false;
};

inline std::vector<Fiber>& fibers() {
  static std::vector<Fiber> all;
  return all;
}

static ucontext_t scheduler;
static unsigned running;
static std::function<void()> kernel;

static void run_thread() {
  kernel();
  fibers()[running].ended = true;
}

struct Bytes {
  unsigned char* at;
  std::vector<unsigned char> content;
};

inline std::vector<Bytes>& watched() {  // as other blocks see it
  static std::vector<Bytes> all;
  return all;
}

inline std::vector<Bytes>& hidden() {  // written, and not fenced
  static std::vector<Bytes> all;
  return all;
}

constexpr unsigned kDevice = 1, kSystem = 2;
static unsigned working_fences;  // the others do nothing, as if they were missing
static bool system_fenced;       // host and other devices see what this kernel has written

inline void watch(void* memory, size_t size) {
  auto* at = static_cast<unsigned char*>(memory);
  watched().push_back({at, {at, at + size}});
}

inline void fence(unsigned scope) {
  if (!(working_fences & scope)) return;
  system_fenced |= scope == kSystem;
  for (Bytes& some : watched()) std::memcpy(some.content.data(), some.at, some.content.size());
}

inline void hide_unfenced() {
  for (Bytes& some : watched()) {
    for (size_t i = 0; i < some.content.size(); ++i) {
      if (some.at[i] == some.content[i]) continue;
      hidden().push_back({some.at + i, {some.at[i]}});
      some.at[i] = some.content[i];
    }
  }
}

inline void barrier() { swapcontext(&fibers()[running].context, &scheduler); }

// One block, from barrier to barrier; with `reverse` its last thread comes first.
inline void run_block(unsigned block, unsigned num_threads, bool reverse) {
  std::vector<Fiber>& all = fibers();
  if (all.size() < num_threads) all.resize(num_threads);
  blockIdx.x = block;
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    Fiber& fiber = all[thread];
    fiber.ended = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_thread, 0);
  }
  for (unsigned ended = 0; ended < num_threads;) {
    ended = 0;
    for (unsigned turn = 0; turn < num_threads; ++turn) {
      unsigned thread = reverse ? num_threads - 1 - turn : turn;
      running = threadIdx.x = thread;
      if (!all[thread].ended) swapcontext(&scheduler, &all[thread].context);
      ended += all[thread].ended;
    }
    if (ended && ended < num_threads) {
      std::fprintf(stderr, "%u of %u threads have ended before a barrier\n", ended, num_threads);
      std::abort();
    }
  }
}

inline void launch(const std::vector<unsigned>& blocks, unsigned num_threads, bool reverse,
                   std::function<void()> body) {
  kernel = std::move(body);
  gridDim.x = static_cast<unsigned>(blocks.size());
  blockDim.x = num_threads;
  for (unsigned block : blocks) {
    run_block(block, num_threads, reverse);
    hide_unfenced();
  }
  for (const Bytes& late : hidden()) std::memcpy(late.at, late.content.data(), late.content.size());
  hidden().clear();
  watched().clear();
}

}  // namespace cuda_host

inline void __syncthreads() { cuda_host::barrier(); }
inline void __threadfence() { cuda_host::fence(cuda_host::kDevice); }
inline void __threadfence_system() { cuda_host::fence(cuda_host::kSystem); }

template <class T, class V>
T atomicAdd(T* at, V value) {
  T before = *at;
  *at = before + static_cast<T>(value);
  return before;
}
