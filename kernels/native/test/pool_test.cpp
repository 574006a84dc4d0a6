// The pool: runs every piece once, whether helpers sleep or not; rounds do not affect each other.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "threads/pool.h"
#include "check.h"

namespace pdserve {
namespace {

void pause_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// One round whose pieces write plain memory: a missing happens-before is a race for TSan.
void one_round(Pool& pool, int64_t pieces, Random& random) {
  std::vector<int64_t> seen(pieces, 0);
  std::vector<int64_t> of_worker(pool.threads(), 0);
  int64_t uneven = random.below(8);
  pool.run(pieces, [&](int64_t piece, int worker) {
    seen[piece] += piece + 1;
    of_worker[worker] += 1;
    volatile int64_t spent = 0;
    for (int64_t k = 0; k < (piece % 8 == uneven ? 200 : 2); ++k) spent = spent + k;
  });
  int64_t total = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    CHECK(seen[piece] == piece + 1, "piece %d of %d", static_cast<int>(piece),
          static_cast<int>(pieces));
  }
  for (int64_t count : of_worker) total += count;
  CHECK(total == pieces, "%d pieces were run, not %d", static_cast<int>(total),
        static_cast<int>(pieces));
}

void rounds(int threads, int spin_us, int count, int64_t pause) {
  Random random(threads * 1000 + spin_us);
  std::vector<int> cpus;
  if (random.below(2)) cpus = {0, 0, 100000};  // the last core does not exist
  Pool pool(threads, cpus, spin_us);
  CHECK(pool.threads() == threads, "%d threads", pool.threads());
  const int64_t sizes[] = {0, 1, 2, 3, threads, 17, 64, 300};
  for (int k = 0; k < count; ++k) {
    one_round(pool, sizes[random.below(8)], random);
    if (pause && random.below(4) == 0) pause_us(random.below(pause));
  }
}

}  // namespace

void test_pool() {
  for (int threads : {1, 2, 3, 4, 16}) {
    rounds(threads, 0, 2000, 0);     // helpers go straight to sleep
    rounds(threads, 20, 500, 60);    // some sleep, some spin
    rounds(threads, 1000, 100, 0);   // more threads than cores, all spinning
    rounds(threads, 10, 100, 2000);  // all are asleep when the next round starts
  }
  for (int k = 0; k < 300; ++k) {  // ends while helpers start, spin, sleep, or have just worked
    Random random(k);
    Pool pool(1 + k % 5, {}, k % 3 * 50);
    if (k % 2) one_round(pool, random.below(40), random);
    if (k % 4 == 0) pause_us(random.below(300));
  }
  std::vector<std::thread> callers;  // pools are independent of each other
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] { rounds(2 + caller, 10, 300, 50); });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace pdserve
