#include "threads/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace pdserve {
namespace {

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // some sandboxes refuse this
}

// Spins until `word` differs from `seen` or the time is over; returns whether it differs.
bool spin(const std::atomic<uint32_t>& word, uint32_t seen, int spin_us) {
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < 64; ++i) {
      if (word.load(std::memory_order_acquire) != seen) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cpus, int spin_us) : spin_us_(spin_us) {
  for (int worker = 1; worker < threads; ++worker) {
    int cpu = worker < static_cast<int>(cpus.size()) ? cpus[worker] : -1;
    helpers_.emplace_back([this, worker, cpu] {
      if (cpu >= 0) pin(cpu);
      help(worker);
    });
  }
}

Pool::~Pool() {
  ending_.store(true);
  round_.fetch_add(1);
  futex_wake_all(round_);
  for (auto& helper : helpers_) helper.join();
}

void Pool::run_all(int64_t pieces, Call call, const void* body) {
  call_ = call;
  body_ = body;
  pieces_ = pieces;
  next_.store(0, std::memory_order_relaxed);
  gate_.store(0);  // opens: publishes the job
  round_.fetch_add(1);
  if (sleepers_.load()) futex_wake_all(round_);
  work(0);
  gate_.fetch_or(kClosed);
  for (uint32_t inside; (inside = gate_.load(std::memory_order_acquire)) != kClosed;) {
    if (spin(gate_, inside, spin_us_)) continue;
    caller_sleeps_.store(true);
    futex_wait(gate_, inside);
    caller_sleeps_.store(false);
  }
}

void Pool::work(int worker) {
  for (int64_t piece; (piece = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) {
    call_(body_, piece, worker);
  }
}

void Pool::help(int worker) {
  uint32_t seen = 0;
  for (;;) {
    while (round_.load(std::memory_order_acquire) == seen) {
      if (spin(round_, seen, spin_us_)) break;
      sleepers_.fetch_add(1);
      futex_wait(round_, seen);
      sleepers_.fetch_sub(1);
    }
    seen = round_.load();
    if (ending_.load()) return;
    if (!enter()) continue;
    work(worker);
    gate_.fetch_sub(1);
    if (caller_sleeps_.load()) futex_wake_all(gate_);
  }
}

// Enters the job; returns false if it is closed. The helper is inside until it decrements gate_.
bool Pool::enter() {
  uint32_t inside = gate_.load(std::memory_order_relaxed);
  while (!(inside & kClosed)) {
    if (gate_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

}  // namespace pdserve
