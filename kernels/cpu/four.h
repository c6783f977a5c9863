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

static inline __m512 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

struct Four {
  uint16_t step, least;
  __m512i quants[2];
};

// Whether the block is this, to float32's rounding.
static inline bool is_same(const Four& four, const __m512* values, float most) {
  const __m512 step = _mm512_set1_ps(_cvtsh_ss(four.step)), least = _mm512_set1_ps(_cvtsh_ss(four.least));
  const __m512 tolerance = _mm512_set1_ps(most * 1e-6f);
  for (int half = 0; half < 2; ++half) {
    const __m512 again = _mm512_fmadd_ps(_mm512_cvtepi32_ps(four.quants[half]), step, least);
    const __m512 off = _mm512_abs_ps(_mm512_sub_ps(again, values[half]));
    if (!_mm512_cmp_ps_mask(off, tolerance, _CMP_LE_OQ) || _mm512_cmp_ps_mask(off, tolerance, _CMP_NLE_UQ))
      return false;
  }
  return true;
}

// Find the quants of 32 values; false if there are none that are exact.
static inline bool find_four(const float* from, Four& four) {
  const __m512 values[2] = {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)};
  const float low = std::min(_mm512_reduce_min_ps(values[0]), _mm512_reduce_min_ps(values[1]));
  const float high = std::max(_mm512_reduce_max_ps(values[0]), _mm512_reduce_max_ps(values[1]));
  const float most = std::max(std::fabs(low), std::fabs(high)), span = high - low;
  if (!(span > most * 1e-6f)) {  // all alike, in two halves of its digits
    four.step = to_half(low), four.least = to_half(low - _cvtsh_ss(four.step));
    four.quants[0] = four.quants[1] = _mm512_set1_epi32(1);
    return is_same(four, values, most);
  }
  const __m512 base = _mm512_set1_ps(low);
  for (int levels = FOUR_MOST; levels >= 1; --levels) {
    const float step = span / levels;
    const __m512 ratio = _mm512_set1_ps(levels / span);
    __mmask16 odd = 0;
    __m512i quants[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 place = _mm512_mul_ps(_mm512_sub_ps(values[half], base), ratio);
      quants[half] = _mm512_cvtps_epi32(place);
      const __m512 off = _mm512_abs_ps(_mm512_sub_ps(place, _mm512_cvtepi32_ps(quants[half])));
      odd |= _mm512_cmp_ps_mask(off, _mm512_set1_ps(2e-3f), _CMP_NLE_UQ);
    }
    if (odd) continue;
    four.step = to_half(step);
    for (int first = 0; first + levels <= FOUR_MOST; ++first) {  // the smallest of them need not be quant 0
      four.least = to_half(low - first * _cvtsh_ss(four.step));
      for (int half = 0; half < 2; ++half)
        four.quants[half] = _mm512_add_epi32(quants[half], _mm512_set1_epi32(first));
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
  _mm512_store_si512(quants, four.quants[0]);
  _mm512_store_si512(quants + 16, four.quants[1]);
  const int shift = n < 16 ? 0 : 4;
  for (int k = 0; k < 32; ++k)
    to[k / 4 * 64 + n % 16 * 4 + k % 4] |= static_cast<uint8_t>(quants[k] << shift);
  std::memcpy(to + 512 + n * 2, &four.step, 2);
  std::memcpy(to + 576 + n * 2, &four.least, 2);
  return true;
}
