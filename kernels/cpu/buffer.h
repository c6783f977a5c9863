// Memory that grows to the largest step seen, aligned to cache lines; its content is nobody's.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>

template <class T> class Buffer {  // grows, aligned, never keeps what it held
 public:
  T* get(int64_t count) {
    if (count > size_) {
      size_ = count;
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64)));
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
