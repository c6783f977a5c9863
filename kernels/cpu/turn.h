// Rows turned before they are rounded: a fixed orthogonal map spreads what is large in a row over all
// of it, so that int8 loses little with one scale a row. A weight's rows are turned alike when it is
// packed, and products stay what they were (after QuaRot, arXiv 2404.00456; there it is done to
// the model). Of a size m x p with p the largest power of 2 in it: signs, then the Hadamard matrix of
// p, then the cosine transform of m.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

class Turn {
 public:
  static constexpr int64_t ODD_MOST = 63, POWER_LEAST = 32;

  explicit Turn(int64_t size) : power_(power_of(size)), odd_(size / power_), signs_(size), cosines_(odd_ * odd_) {
    uint64_t state = 0;
    const float scale = 1 / std::sqrt(static_cast<float>(power_));
    for (float& sign : signs_) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sign = state >> 63 ? scale : -scale;
    }
    for (int64_t i = 0; i < odd_; ++i)
      for (int64_t j = 0; j < odd_; ++j)
        cosines_[i * odd_ + j] = static_cast<float>(std::sqrt((i ? 2. : 1.) / odd_) *
                                                    std::cos(M_PI * i * (2 * j + 1) / (2. * odd_)));
  }

  static bool fits(int64_t size) { return power_of(size) >= POWER_LEAST && size / power_of(size) <= ODD_MOST; }

  int64_t size() const { return power_ * odd_; }

  void apply(float* row) const {
    for (int64_t at = 0; at < size(); at += power_) hadamard(row + at, signs_.data() + at);
    if (odd_ > 1)
      for (int64_t at = 0; at < power_; at += 16) cosine(row + at);
  }

 private:
  int64_t power_, odd_;
  std::vector<float> signs_, cosines_;

  static int64_t power_of(int64_t size) { return size & -size; }

  void hadamard(float* row, const float* signs) const {
    for (int64_t at = 0; at < power_; at += 16) {
      Floats v = load(row + at) * load(signs + at);
      v = butterfly<1>(v), v = butterfly<2>(v), v = butterfly<4>(v), v = butterfly<8>(v);
      store(row + at, v);
    }
    for (int64_t stride = 16; stride < power_; stride *= 2)
      for (int64_t from = 0; from < power_; from += 2 * stride)
        for (int64_t at = from; at < from + stride; at += 16) {
          const Floats a = load(row + at), b = load(row + at + stride);
          store(row + at, a + b);
          store(row + at + stride, a - b);
        }
  }

  void cosine(float* row) const {
    Floats all[ODD_MOST];
    for (int64_t j = 0; j < odd_; ++j) all[j] = load(row + j * power_);
    const float* factor = cosines_.data();
    for (int64_t i = 0; i < odd_; ++i) {
      Floats even = floats(0), odd = floats(0);
      for (int64_t j = 0; j + 1 < odd_; j += 2, factor += 2) {
        even = fma(all[j], floats(factor[0]), even);
        odd = fma(all[j + 1], floats(factor[1]), odd);
      }
      store(row + i * power_, fma(all[odd_ - 1], floats(*factor++), even + odd));
    }
  }
};
