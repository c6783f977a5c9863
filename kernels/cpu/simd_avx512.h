// simd.h's words in the instructions of AVX-512 with VNNI, and BF16 where the CPU has it too. Never
// called on a CPU without what this was compiled for.
#pragma once
#include <immintrin.h>

typedef __m512 Floats;
typedef int32_t Ints __attribute__((vector_size(64)));
typedef __mmask16 Lanes;

constexpr int ROWS_MOST = 8;  // rows of a product whose sums the registers hold,
constexpr int HALVES = 2;     // for so many times 16 outputs
constexpr int TURNED_ROWS_MOST = 6;  // where nothing is done between the blocks: more lack registers for addresses
constexpr int CHAINS = 2;     // of sums that attention to one token keeps going

static inline Floats floats(float x) { return _mm512_set1_ps(x); }
static inline Ints ints(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
static inline Ints counted() { return (Ints)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
static inline Ints load_ints(const void* p) { return (Ints)_mm512_loadu_si512(p); }
static inline void store_ints(int32_t* p, Ints v) { _mm512_storeu_si512(p, (__m512i)v); }
static inline void store_bytes(int8_t* p, Ints v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}

// To p, p + 4 and so on; what lies between them is another thread's.
static inline void store_bytes_apart(uint8_t* p, Ints v) {
  _mm512_mask_storeu_epi8(p, 0x1111111111111111, (__m512i)v);
}

// Numbers that bf16 holds exactly, side by side: low's before high's in each lane.
static inline Ints exact_pairs(Floats low, Floats high) {
  return (Ints)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                       _mm512_castps_si512(high));
}

static inline Floats load_bf16(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// To the nearest, of two the even one; what is no number stays none.
static inline __m256i to_bf16(Floats v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), none, quiet));
#endif
}

static inline void store_bf16(bf16* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
}

// To p, p + 2 and so on; what lies between them is another thread's.
static inline void store_bf16_apart(bf16* p, Floats v) {
  _mm512_mask_storeu_epi16(p, 0x55555555, _mm512_cvtepu16_epi32(to_bf16(v)));
}

static inline Floats load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static inline float from_half(uint16_t half) { return _cvtsh_ss(half); }

// Two adjacent values, or four bytes, in every lane.
static inline Ints broadcast4(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  Ints spread = ints(bits);
#if !defined(__AVX512BF16__)
  asm("" : "+v"(spread));  // or gcc takes pairs apart before they are spread, which keeps one port too busy
#endif
  return spread;
}

static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
static inline float first_of(Floats a) { return _mm512_cvtss_f32(a); }
static inline Floats round(Floats a) { return _mm512_roundscale_ps(a, 0); }
static inline Floats times_power(Floats a, Floats whole) { return _mm512_scalef_ps(a, whole); }
static inline Ints round_to_ints(Floats a) { return (Ints)_mm512_cvtps_epi32(a); }
static inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps((__m512i)a); }

// Adjacent lanes are the two parts of a complex number.
static inline Floats multiply_complex(Floats a, Floats b) {
  const Floats crossed = _mm512_permute_ps(a, 0xB1) * _mm512_movehdup_ps(b);
  return _mm512_fmaddsub_ps(a, _mm512_moveldup_ps(b), crossed);
}

// Sums in the lanes without bit S, differences in those with it, of each lane and the one that lies S
// away: a pass of Hadamard's matrix.
template <int S> static inline Floats butterfly(Floats a) {
  constexpr int WITH = S == 1 ? 0xaaaa : S == 2 ? 0xcccc : S == 4 ? 0xf0f0 : 0xff00;
  const Floats sign = _mm512_mask_blend_ps(WITH, floats(1), floats(-1));
  Floats other;
  if constexpr (S == 1) other = _mm512_permute_ps(a, 0xB1);
  if constexpr (S == 2) other = _mm512_permute_ps(a, 0x4E);
  if constexpr (S == 4) other = _mm512_shuffle_f32x4(a, a, 0xB1);
  if constexpr (S == 8) other = _mm512_shuffle_f32x4(a, a, 0x4E);
  return fma(a, sign, other);
}

static inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
static inline float largest(Floats a) { return _mm512_reduce_max_ps(a); }
static inline float smallest(Floats a) { return _mm512_reduce_min_ps(a); }
static inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32((__m512i)a); }
static inline int32_t smallest(Ints a) { return _mm512_reduce_min_epi32((__m512i)a); }

// The first n lanes, all for n >= 16.
static inline Lanes first_lanes(int64_t n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<Lanes>((1u << n) - 1);
}
static inline Lanes above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline Lanes at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline Lanes equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline Lanes unordered(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
static inline Lanes not_finite(Floats a) { return _mm512_fpclass_ps_mask(a, 0x99); }  // NaN, infinity
static inline Lanes either(Lanes a, Lanes b) { return a | b; }
static inline bool any(Lanes lanes) { return lanes; }
static inline bool all(Lanes lanes) { return lanes == 0xffff; }
static inline Floats select(Lanes lanes, Floats a, Floats b) { return _mm512_mask_mov_ps(b, lanes, a); }
static inline Ints select(Lanes lanes, Ints a, Ints b) {
  return (Ints)_mm512_mask_mov_epi32((__m512i)b, lanes, (__m512i)a);
}

// The first n of 16 alone; what is not there reads as `missing`.
static inline Floats load_first(const float* p, int64_t n, float missing) {
  return _mm512_mask_loadu_ps(floats(missing), first_lanes(n), p);
}
static inline void store_first(float* p, int64_t n, Floats v) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

static inline Floats dot_bf16(Floats sum, Ints a, Ints b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const Ints upper = ints(static_cast<int32_t>(0xffff0000));  // a bf16 is the upper half of a float
  return fma((Floats)(a & upper), (Floats)(b & upper), fma((Floats)(a << 16), (Floats)(b << 16), sum));
#endif
}

// Sums of weights + 128, unsigned bytes, times x, signed ones: the 128 is undone by what they start from.
static inline Ints dots_from(int32_t offset) { return ints(offset); }
static inline Ints dot_bytes(Ints dots, Ints weights, Ints x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)dots, (__m512i)weights, (__m512i)x);
}
// The same of a block's quants of 0 to 15, told at its end.
static inline Ints dot_quants(Ints dots, Ints quants, Ints x) { return dot_bytes(dots, quants, x); }
static inline Ints told_dots(Ints dots) { return dots; }

static inline void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
static inline void fetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Sums in double, in an order that depends on the number of values alone.
class DoubleSum {
 public:
  void add(Floats v) {
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};
