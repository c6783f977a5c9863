// AVX-512 with BF16 and VNNI: conversions, 2^x and silu. Included by the files that CPUs with these
// instructions run (kernels/native.py asks the CPU first). gcc 12 has no __bf16: it is a uint16_t here.
#pragma once
#include <cmath>
#include <cstdint>
#include <immintrin.h>

typedef uint16_t bf16;

static inline __m512 load_bf16(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline void store_bf16(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

// Two adjacent values, or four bytes, in every lane.
static inline __m512i broadcast4(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return _mm512_set1_epi32(bits);
}

static inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// 2^x to 2e-6 of its value, as far as bf16 probabilities and silu need it: x = whole + part, the
// part by a Taylor series of e^(part ln 2).
static inline __m512 exp2_ps(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.f));
  const __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.33335581e-3f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, whole);
}

// x / (1 + e^-x). A value that is no number stays none: max and min would hide it.
static inline __m512 silu_ps(__m512 x) {
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(120.f), _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
  const __m512 one = _mm512_set1_ps(1.f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp2_ps(bounded)));
}

// The first n lanes, all for n >= 16.
static inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}
