// What the tests share: checks that count, reproducible random numbers, memory that ends at a page
// that cannot be touched.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

inline int failures = 0;

// Prints the first failures in full; main's exit status says whether there were any.
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

// count values of T; the byte after the last one, and those a page before the first, fault.
template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count) : count_(count) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t inside = ((count * sizeof(T) + 64) / page + 1) * page;
    bytes_ = inside + 2 * page;
    base_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page, inside, PROT_READ | PROT_WRITE)) {
      std::perror("guarded memory");
      std::exit(2);
    }
    // An emulator may lack the suppression of faults in masked loads: then 64 bytes are left.
    size_t slack = std::getenv("NATIVE_TEST_SLACK") ? 64 : 0;
    data_ = reinterpret_cast<T*>(base_ + page + inside - count * sizeof(T) - slack);
  }
  ~Guarded() {
    if (base_) munmap(base_, bytes_);
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
