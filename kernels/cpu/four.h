// Weights in 4 bits: 32 inputs of an output are step x quant + least with quants of 0 to 15, step and
// least in half precision, as GGUF's Q4_0 and Q4_1 hold them. Nothing is rounded here: what a file had
// in 4 bits is found again in its float32 values, whatever format it came in; other weights are
// refused. A block of 32 outputs x 32 inputs lies together, [8][16][4] bytes, of which the low half
// is a quant of outputs 0 to 15 and the high half of 16 to 31, then 32 steps, then 32 leasts.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

constexpr int BLOCK = 32;  // inputs with a scale in common
constexpr int FOUR_BYTES = 640;
constexpr int FOUR_MOST = 15;

struct Four {
  uint16_t step, least;
  Ints quants[2];
};

// Whether the block is this, to float32's rounding.
static inline bool is_same(const Four& four, const Floats* values, float most) {
  const Floats step = floats(from_half(four.step)), least = floats(from_half(four.least));
  const Floats tolerance = floats(most * 1e-6f);
  for (int half = 0; half < 2; ++half) {
    const Floats again = fma(to_floats(four.quants[half]), step, least);
    if (!all(at_least(tolerance, abs(again - values[half])))) return false;
  }
  return true;
}

// Find the quants of 32 values; false if there are none that are exact.
static inline bool find_four(const float* from, Four& four) {
  const Floats values[2] = {load(from), load(from + 16)};
  const float low = smallest(min(values[0], values[1])), high = largest(max(values[0], values[1]));
  const float most = std::max(std::fabs(low), std::fabs(high)), span = high - low;
  if (!(span > most * 1e-6f)) {  // all alike, in two halves of its digits
    four.step = to_half(low), four.least = to_half(low - from_half(four.step));
    four.quants[0] = four.quants[1] = ints(1);
    return is_same(four, values, most);
  }
  const Floats base = floats(low);
  for (int levels = FOUR_MOST; levels >= 1; --levels) {
    const float step = span / levels;
    const Floats ratio = floats(levels / span);
    bool odd = false;
    Ints quants[2];
    for (int half = 0; half < 2; ++half) {
      const Floats place = (values[half] - base) * ratio;
      quants[half] = round_to_ints(place);
      odd |= !all(at_least(floats(2e-3f), abs(place - to_floats(quants[half]))));
    }
    if (odd) continue;
    four.step = to_half(step);
    for (int first = 0; first + levels <= FOUR_MOST; ++first) {  // the smallest of them need not be quant 0
      four.least = to_half(low - first * from_half(four.step));
      for (int half = 0; half < 2; ++half)
        four.quants[half] = quants[half] + ints(first);
      if (is_same(four, values, most)) return true;
    }
  }
  return false;
}

// Put the block of output n of a tile where it belongs; false if it is not one of 4 bits.
static inline bool put_four(const float* from, int64_t n, uint8_t* to) {
  Four four;
  if (!find_four(from, four)) return false;
  alignas(64) int32_t quants[32];
  store_ints(quants, four.quants[0]);
  store_ints(quants + 16, four.quants[1]);
  const int shift = n < 16 ? 0 : 4;
  for (int k = 0; k < 32; ++k)
    to[k / 4 * 64 + n % 16 * 4 + k % 4] |= static_cast<uint8_t>(quants[k] << shift);
  std::memcpy(to + 512 + n * 2, &four.step, 2);
  std::memcpy(to + 576 + n * 2, &four.least, 2);
  return true;
}
