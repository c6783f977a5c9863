// From a row of logits to its token: the largest, and a draw under temperature, top_k, top_p and
// min_p. engine/sampler.py has the same in PyTorch and is the specification; step.cpp shares the rows
// among the threads. A row's token depends on its logits, its parameters and its uniform alone.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

struct Best {
  float value;  // NaN if any logit is none
  int64_t token;
};

// The largest of a row, of equal ones the first.
inline Best best_of(const float* row, int64_t count) {
  Floats most = floats(-INFINITY);
  Ints places = ints(0), here = counted();
  Lanes odd = first_lanes(0);
  for (int64_t k = 0; k < count; k += 16) {
    const Floats value = load_first(row + k, count - k, -INFINITY);
    odd = either(odd, unordered(value));
    const Lanes more = above(value, most);
    most = select(more, value, most);
    places = select(more, here, places);
    here = here + ints(16);
  }
  const float value = largest(most);
  if (any(odd)) return {NAN, 0};
  return {value, smallest(select(equal(most, floats(value)), places, ints(INT32_MAX)))};
}

struct Draw {
  float temperature, min_p;
  int64_t top_k;  // the number of tokens when off
  double top_p;   // 1 when off
  double uniform;
};

// The sum of weights, in an order that depends on their number alone.
inline double sum_of(const float* weights, int64_t count) {
  DoubleSum sum;
  for (int64_t k = 0; k < count; k += 16) sum.add(load_first(weights + k, count - k, 0));
  return sum.total();
}

inline void drop_below(float* weights, int64_t count, float least) {
  for (int64_t k = 0; k < count; ++k) weights[k] = weights[k] < least ? 0.f : weights[k];
}

// The smallest weight that is kept if the largest are kept until what amount(weight) tells of each
// comes to `target`; none below `floor` can be it. Weights from 0 to 1 order as their bits do: 11 or
// 10 bits are looked at in a pass, and the next pass goes on inside the one value of these at which
// the target is reached from above.
template <class Amount>
float threshold(const float* weights, int64_t count, double target, float floor, const Amount& amount) {
  uint32_t prefix = 0;
  int width = 0;
  double above = 0;
  for (const int bits : {11, 11, 10}) {
    const int shift = 32 - width - bits;
    double sums[2048] = {};
    bool present[2048] = {};
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] < floor) continue;
      uint32_t word;
      std::memcpy(&word, weights + i, sizeof word);
      if (width && word >> (32 - width) != prefix) continue;
      const uint32_t value = word >> shift & ((1u << bits) - 1);
      sums[value] += amount(weights[i]), present[value] = true;
    }
    int least = -1;  // where the target is reached, or the last there is if rounding keeps it from being
    double before = above;
    for (int value = (1 << bits) - 1; value >= 0; --value) {
      if (!present[value]) continue;
      least = value, before = above;
      above += sums[value];
      if (above >= target) break;
    }
    above = before;
    prefix = prefix << bits | static_cast<uint32_t>(least);
    width += bits;
  }
  float found;
  std::memcpy(&found, &prefix, sizeof found);
  return found;
}

// Draw a token; `row` of finite logits, whose largest is `most`, is overwritten with its weights.
inline int64_t drawn_from(float* row, int64_t count, float most, const Draw& draw) {
  const Floats largest = floats(most), scale = floats(1.44269504f / draw.temperature);
  for (int64_t k = 0; k < count; k += 16) {
    const Floats power = (load_first(row + k, count - k, 0) - largest) * scale;
    // What is hidden (-infinity), or too small for its weight to be a normal number, weighs nothing.
    store_first(row + k, count - k, select(at_least(power, floats(-126.f)), exp2_of(power), floats(0)));
  }
  if (draw.top_k < count) {
    const auto one = [](float) { return 1.0; };
    drop_below(row, count, threshold(row, count, static_cast<double>(draw.top_k), 0, one));
  }
  if (draw.top_p < 1) {
    // All that are below the floor are less than what may be left out.
    const double sum = sum_of(row, count), floor = (1 - draw.top_p) * sum / count;
    const auto itself = [](float weight) -> double { return weight; };
    drop_below(row, count, threshold(row, count, draw.top_p * sum, static_cast<float>(floor * 0.999), itself));
  }
  if (draw.min_p > 0) drop_below(row, count, draw.min_p);
  double target = draw.uniform * sum_of(row, count);
  constexpr int64_t STRETCH = 256;
  int64_t k = 0, last = 0;
  for (; k + STRETCH < count; k += STRETCH) {
    const double sum = sum_of(row + k, STRETCH);
    if (sum > target) break;
    target -= sum;
  }
  // To the end, should rounding keep the sum from coming up to the target: then it is the last of some
  // weight, which may stand before this stretch.
  for (; k < count; ++k) {
    if (row[k] == 0) continue;
    target -= row[k], last = k;
    if (target < 0) return last;
  }
  for (last = count - 1; last > 0 && row[last] == 0;) --last;
  return last;
}
