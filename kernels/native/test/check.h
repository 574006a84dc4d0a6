// Shared definitions of the tests: names, counting checks, reproducible random numbers, memory that
// ends at an inaccessible page.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace pdserve {  // main.cpp runs them

void test_words();
void test_pool();
void test_linear();
void test_pack();
void test_elementwise();
void test_attention();
void test_sampling();
void test_decoder();

}  // namespace pdserve

inline int failures = 0;

// Prints the first failures in full; main's exit status tells whether there were any.
#define CHECK(holds, ...)                                                       \
  do {                                                                          \
    if (!(holds) && ++failures <= 20) {                                         \
      std::printf("%s:%d: %s is false: ", __FILE__, __LINE__, #holds);          \
      std::printf(__VA_ARGS__);                                                 \
      std::printf("\n");                                                        \
    }                                                                           \
  } while (0)

// xorshift64*: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  uint32_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 2685821657736338717u) >> 32);
  }
  int64_t below(int64_t n) { return bits() % n; }
  // In [-1, 1].
  float uniform() { return static_cast<float>(static_cast<int32_t>(bits())) / 2147483648.0f; }

 private:
  uint64_t state_;
};

// Returns whether case i runs: with NATIVE_TEST_THIN=n only every nth, for emulators and
// sanitizers.
inline bool runs(int64_t i) {
  static const char* const thin = std::getenv("NATIVE_TEST_THIN");
  static const int64_t n = thin ? std::atoll(thin) : 1;
  return i % n == 0;
}

// Unused mappings by size: creating mappings is slow with emulators and sanitizers.
inline std::map<size_t, std::vector<char*>>& spare_pages() {
  static std::map<size_t, std::vector<char*>> spare;
  return spare;
}

// Returns an inaccessible page, `inside` bytes of NaN, and an inaccessible page. Not thread-safe.
inline char* take_pages(size_t page, size_t inside) {
  std::vector<char*>& spare = spare_pages()[inside + 2 * page];
  if (spare.empty()) {
    void* fresh = mmap(nullptr, inside + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    spare.push_back(static_cast<char*>(fresh));
    if (fresh == MAP_FAILED || mprotect(spare.back() + page, inside, PROT_READ | PROT_WRITE)) {
      std::perror("guarded memory");
      std::exit(2);
    }
  }
  char* base = spare.back();
  spare.pop_back();
  std::memset(base + page, 0xff, inside);
  return base;
}

// `count` values of T; the byte after the last one and those a page before the first fault.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : count_(count) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t inside = ((count * sizeof(T) + 64) / page + 1) * page;
    bytes_ = inside + 2 * page;
    base_ = take_pages(page, inside);
    // An emulator may not suppress faults in masked loads; then 64 more bytes are accessible.
    size_t slack = std::getenv("NATIVE_TEST_SLACK") ? 64 : 0;
    data_ = reinterpret_cast<T*>(base_ + page + inside - count * sizeof(T) - slack);
  }
  ~Guarded() {
    if (base_) spare_pages()[bytes_].push_back(base_);
  }
  Guarded(Guarded&& other) noexcept
      : count_(other.count_), bytes_(other.bytes_), base_(other.base_), data_(other.data_) {
    other.base_ = nullptr;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return count_; }

 private:
  int64_t count_;
  size_t bytes_;
  char* base_;
  T* data_;
};
