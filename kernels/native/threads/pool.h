// Threads for the kernels: the caller and threads - 1 helpers, optionally pinned to one core each.
//
// A helper without work spins for a bounded time, then sleeps in the kernel (futex). The caller
// does not wait for helpers that the system has not scheduled before the work is done: on a busy
// machine it does all the work. Only one thread at a time may call a pool.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace pdserve {

class Pool {
 public:
  // cpus: one core per thread, the caller's first; empty: not pinned.
  explicit Pool(int threads, const std::vector<int>& cpus = {}, int spin_us = 100);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Calls body(piece, worker) for every piece in [0, pieces), in any order, with worker <
  // threads(). Returns when all are done. body must not throw.
  template <class Body>
  void run(int64_t pieces, const Body& body) {
    if (pieces <= 1 || helpers_.empty()) {
      for (int64_t piece = 0; piece < pieces; ++piece) body(piece, 0);
      return;
    }
    run_all(pieces, [](const void* self, int64_t piece, int worker) {
      (*static_cast<const Body*>(self))(piece, worker);
    }, &body);
  }

 private:
  using Call = void (*)(const void*, int64_t, int);

  void run_all(int64_t pieces, Call call, const void* body);
  void help(int worker);
  bool enter();
  void work(int worker);

  std::vector<std::thread> helpers_;
  int spin_us_;
  Call call_ = nullptr;
  const void* body_ = nullptr;
  int64_t pieces_ = 0;
  alignas(64) std::atomic<uint32_t> round_{0};  // changes for a new job and at the end
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  // kClosed, or the number of helpers inside the job. Helpers may enter only while it is open, and
  // the job's fields above change only while it is closed and empty.
  static constexpr uint32_t kClosed = 1u << 31;
  alignas(64) std::atomic<uint32_t> gate_{kClosed};
  std::atomic<bool> caller_sleeps_{false};
};

}  // namespace pdserve
