// Sixteen floats or ints at a time: all that our C++ asks of a CPU. The words are the same for every
// target, kernels/native.py compiles what uses them once for each; which CPU runs which, processor.cpp
// tells. Beside what simd_avx512.h and simd_parts.h define there are 2^x and silu here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t bf16;  // gcc 12 has no __bf16

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#else
#include "simd_parts.h"
#endif

// 2^x to 2e-6 of its value, as far as bf16 probabilities and silu need it: x = whole + part, the
// part by a Taylor series of e^(part ln 2).
static inline Floats exp2_of(Floats x) {
  x = max(x, floats(-126.f));
  const Floats whole = round(x), part = x - whole;
  Floats p = floats(1.33335581e-3f);
  p = fma(p, part, floats(9.61812911e-3f));
  p = fma(p, part, floats(5.55041087e-2f));
  p = fma(p, part, floats(2.40226507e-1f));
  p = fma(p, part, floats(6.93147181e-1f));
  p = fma(p, part, floats(1.f));
  return times_power(p, whole);
}

// x / (1 + e^-x). A value that is no number stays none: max and min would hide it.
static inline Floats silu_of(Floats x) {
  const Floats bounded = min(floats(120.f), x * floats(-1.44269504f));
  return x / (floats(1.f) + exp2_of(bounded));
}
