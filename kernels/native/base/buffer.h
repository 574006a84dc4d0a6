// Aligned memory that grows but never shrinks; growing discards the content.
#pragma once
#include <cstdlib>
#include <memory>
#include <new>

#include "base/common.h"

namespace pdserve {

template <class T>
class Buffer {
 public:
  // Returns memory for at least `count` values.
  T* at_least(int64_t count) {
    if (count > size_) {
      size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), kAlign));
      data_.reset(static_cast<T*>(std::aligned_alloc(kAlign, bytes)));
      size_ = data_ ? count : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace pdserve
