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
    const int64_t block = power_ >= 64 ? 64 : 32;
    for (int64_t at = 0; at < power_; at += block)
      block == 64 ? hadamard_of<4>(row + at, signs + at) : hadamard_of<2>(row + at, signs + at);
    for (int64_t stride = block; stride < power_; stride *= 2)
      for (int64_t from = 0; from < power_; from += 2 * stride)
        for (int64_t at = from; at < from + stride; at += 16) {
          const Floats a = load(row + at), b = load(row + at + stride);
          store(row + at, a + b);
          store(row + at + stride, a - b);
        }
  }

  // The passes that stay within N registers.
  template <int N> static void hadamard_of(float* row, const float* signs) {
    Floats all[N];
    for (int i = 0; i < N; ++i) all[i] = load(row + i * 16) * load(signs + i * 16);
    for (Floats& one : all) one = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(one))));
    for (int stride = 1; stride < N; stride *= 2)
      for (int i = 0; i < N; ++i)
        if (!(i & stride)) {
          const Floats a = all[i], b = all[i + stride];
          all[i] = a + b, all[i + stride] = a - b;
        }
    for (int i = 0; i < N; ++i) store(row + i * 16, all[i]);
  }

  // Rows of the cosine transform are even or odd about their middle, by turns: half of the products do.
  void cosine(float* row) const {
    const int64_t half = odd_ / 2;
    Floats sums[ODD_MOST / 2 + 1], differences[ODD_MOST / 2 + 1];
    for (int64_t j = 0; j < half; ++j) {
      const Floats a = load(row + j * power_), b = load(row + (odd_ - 1 - j) * power_);
      sums[j] = a + b, differences[j] = a - b;
    }
    sums[half] = load(row + half * power_), differences[half] = floats(0);
    for (int64_t i = 0; i < odd_; ++i) {
      const float* factors = cosines_.data() + i * odd_;
      const Floats* terms = i & 1 ? differences : sums;
      Floats total = terms[half] * floats(factors[half]);
      for (int64_t j = 0; j < half; ++j) total = fma(terms[j], floats(factors[j]), total);
      store(row + i * power_, total);
    }
  }
};
