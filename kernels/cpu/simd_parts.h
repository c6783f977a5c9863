// simd.h's words in the vectors of gcc and clang, in parts as wide as the CPU's registers: with AVX2,
// FMA and F16C, whose instructions are named where the compiler would not find them, or with nothing
// but the language. Results are those of simd_avx512.h but for rounding in another order.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define WORD static inline __attribute__((always_inline))

#if defined(__AVX2__)
constexpr int PART_BYTES = 32;
#else
constexpr int PART_BYTES = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES, PART_LANES = PART_BYTES / 4;

// As in simd_avx512.h, for 16 registers, or 32 of half the size.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS_MOST = 4;
#else
constexpr int ROWS_MOST = 2;
#endif
constexpr int HALVES = 1, CHAINS = 1, TURNED_ROWS_MOST = ROWS_MOST;

typedef float FloatPart __attribute__((vector_size(PART_BYTES)));
typedef int32_t IntPart __attribute__((vector_size(PART_BYTES)));
typedef uint32_t WordPart __attribute__((vector_size(PART_BYTES)));
typedef int16_t ShortPart __attribute__((vector_size(PART_BYTES)));
typedef uint16_t NarrowPart __attribute__((vector_size(PART_BYTES / 2)));
typedef int8_t BytePart __attribute__((vector_size(PART_BYTES / 4)));

struct Floats {
  FloatPart part[PARTS];
};
struct Ints {
  IntPart part[PARTS];
};
struct Lanes {  // all bits of a lane, or none
  IntPart part[PARTS];
};

template <class To, class Each> WORD To each_part(const Each& each) {
  To to;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) to.part[i] = each(i);
  return to;
}

template <class Part, class T> WORD Part read(const T* p) {
  Part part;
  std::memcpy(&part, p, sizeof part);
  return part;
}

#define EACH_PART(To, expression) \
  each_part<To>([&]([[maybe_unused]] int i) __attribute__((always_inline)) { return expression; })

WORD Floats operator+(Floats a, Floats b) { return EACH_PART(Floats, a.part[i] + b.part[i]); }
WORD Floats operator-(Floats a, Floats b) { return EACH_PART(Floats, a.part[i] - b.part[i]); }
WORD Floats operator*(Floats a, Floats b) { return EACH_PART(Floats, a.part[i] * b.part[i]); }
WORD Floats operator/(Floats a, Floats b) { return EACH_PART(Floats, a.part[i] / b.part[i]); }
WORD Ints operator+(Ints a, Ints b) { return EACH_PART(Ints, a.part[i] + b.part[i]); }
WORD Ints operator&(Ints a, Ints b) { return EACH_PART(Ints, a.part[i] & b.part[i]); }
WORD Ints operator^(Ints a, Ints b) { return EACH_PART(Ints, a.part[i] ^ b.part[i]); }
WORD Ints operator<<(Ints a, int bits) { return EACH_PART(Ints, a.part[i] << bits); }
WORD Ints operator>>(Ints a, int bits) { return EACH_PART(Ints, a.part[i] >> bits); }

WORD Floats floats(float x) { return EACH_PART(Floats, (x - FloatPart{})); }
WORD Ints ints(int32_t x) { return EACH_PART(Ints, (x - IntPart{})); }
WORD Ints counted() {
  Ints all;
  for (int i = 0; i < 16; ++i) all.part[i / PART_LANES][i % PART_LANES] = i;
  return all;
}

WORD Floats load(const float* p) { return EACH_PART(Floats, read<FloatPart>(p + i * PART_LANES)); }
WORD void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
WORD Ints load_ints(const void* p) {
  return EACH_PART(Ints, read<IntPart>(static_cast<const int32_t*>(p) + i * PART_LANES));
}
WORD void store_ints(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof v); }
WORD void store_bytes(int8_t* p, Ints v) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) {
    const BytePart bytes = __builtin_convertvector(v.part[i], BytePart);
    std::memcpy(p + i * PART_LANES, &bytes, sizeof bytes);
  }
}

WORD void store_bytes_apart(uint8_t* p, Ints v) {
  int32_t bytes[16];
  store_ints(bytes, v);
  for (int i = 0; i < 16; ++i) p[4 * i] = static_cast<uint8_t>(bytes[i]);
}
WORD Ints exact_pairs(Floats low, Floats high) {
  return EACH_PART(Ints, (IntPart)((WordPart)low.part[i] >> 16) | ((IntPart)high.part[i] & ~0xffff));
}

WORD Floats load_bf16(const bf16* p) {
  return EACH_PART(Floats, (FloatPart)(__builtin_convertvector(read<NarrowPart>(p + i * PART_LANES), IntPart) << 16));
}

// To the nearest, of two the even one; what is no number stays none.
WORD NarrowPart to_bf16(FloatPart v) {
  const WordPart bits = (WordPart)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const IntPart quiet = (IntPart)(bits >> 16 | 0x40), number = (IntPart)(rounded >> 16);
  return __builtin_convertvector(v == v ? number : quiet, NarrowPart);
}
WORD void store_bf16(bf16* p, Floats v) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) {
    const NarrowPart narrow = to_bf16(v.part[i]);
    std::memcpy(p + i * PART_LANES, &narrow, sizeof narrow);
  }
}
WORD void store_bf16_apart(bf16* p, Floats v) {
  bf16 narrow[16];
  store_bf16(narrow, v);
  for (int i = 0; i < 16; ++i) p[2 * i] = narrow[i];
}

WORD FloatPart half_part(const uint8_t* p) {
#if defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const IntPart half = __builtin_convertvector(read<NarrowPart>(p), IntPart);
  const IntPart bits = (half & 0x7fff) << 13, sign = (half & 0x8000) << 16;
  const IntPart number = (IntPart)((FloatPart)bits * 0x1p112f), odd = bits | 0x7f800000;
  return (FloatPart)(((half & 0x7c00) == 0x7c00 ? odd : number) | sign);
#endif
}
WORD Floats load_half(const uint8_t* p) { return EACH_PART(Floats, half_part(p + i * PART_LANES * 2)); }
WORD float from_half(uint16_t half) {
  uint8_t bytes[PART_BYTES / 2] = {};
  std::memcpy(bytes, &half, sizeof half);
  return half_part(bytes)[0];
}
WORD uint16_t to_half(float x) {
#if defined(__AVX2__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = bits >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (!(size <= INFINITY)) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
  bits = (bits & 0x7fffffff) - (112u << 23);
  return sign | static_cast<uint16_t>((bits + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

WORD Ints broadcast4(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  IntPart part = bits - IntPart{};
#if defined(__x86_64__)
  asm("" : "+x"(part));  // or gcc takes it apart before it is spread, which keeps one port too busy
#endif
  return EACH_PART(Ints, part);
}

// Not more than 2^22.
WORD IntPart round_part(FloatPart a) {
#if defined(__AVX2__)
  return (IntPart)_mm256_cvtps_epi32(a);
#else
  const FloatPart large = 0x1.8p23f - FloatPart{};
  return (IntPart)(a + large) - (IntPart)large;
#endif
}

WORD Floats fma(Floats a, Floats b, Floats c) { return EACH_PART(Floats, a.part[i] * b.part[i] + c.part[i]); }
WORD Floats max(Floats a, Floats b) { return EACH_PART(Floats, (a.part[i] > b.part[i] ? a.part[i] : b.part[i])); }
WORD Floats min(Floats a, Floats b) { return EACH_PART(Floats, (a.part[i] < b.part[i] ? a.part[i] : b.part[i])); }
WORD Floats abs(Floats a) { return EACH_PART(Floats, (FloatPart)((IntPart)a.part[i] & 0x7fffffff)); }
WORD float first_of(Floats a) { return a.part[0][0]; }
WORD Ints round_to_ints(Floats a) { return EACH_PART(Ints, round_part(a.part[i])); }
WORD Floats to_floats(Ints a) { return EACH_PART(Floats, __builtin_convertvector(a.part[i], FloatPart)); }
WORD Floats round(Floats a) { return to_floats(round_to_ints(a)); }
WORD Floats times_power(Floats a, Floats whole) {
  return EACH_PART(Floats, (FloatPart)((IntPart)a.part[i] + (__builtin_convertvector(whole.part[i], IntPart) << 23)));
}

WORD Floats multiply_complex(Floats a, Floats b) {
  float x[16], y[16], product[16];
  store(x, a), store(y, b);
  for (int i = 0; i < 16; i += 2) {
    product[i] = x[i] * y[i] - x[i + 1] * y[i + 1];
    product[i + 1] = x[i + 1] * y[i] + x[i] * y[i + 1];
  }
  return load(product);
}

template <int S> WORD Floats butterfly(Floats a) {
  float in[16], out[16];
  store(in, a);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) out[i] = i & S ? in[i ^ S] - in[i] : in[i] + in[i ^ S];
  return load(out);
}

template <class V, class Join> WORD auto joined(const V& a, const Join& join) {
  auto all = a.part[0];
#pragma GCC unroll 4
  for (int i = 1; i < PARTS; ++i) all = join(all, a.part[i]);
  auto one = all[0];
  for (int lane = 1; lane < PART_LANES; ++lane) one = join(one, all[lane]);
  return one;
}
WORD float sum(Floats a) { return joined(a, [](auto x, auto y) { return x + y; }); }
WORD float largest(Floats a) { return joined(a, [](auto x, auto y) { return x > y ? x : y; }); }
WORD float smallest(Floats a) { return joined(a, [](auto x, auto y) { return x < y ? x : y; }); }
WORD int32_t sum(Ints a) { return joined(a, [](auto x, auto y) { return x + y; }); }
WORD int32_t smallest(Ints a) { return joined(a, [](auto x, auto y) { return x < y ? x : y; }); }

WORD Lanes first_lanes(int64_t n) {
  const Ints numbers = counted();
  const int32_t count = n >= 16 ? 16 : n <= 0 ? 0 : static_cast<int32_t>(n);
  return EACH_PART(Lanes, numbers.part[i] < count);
}
WORD Lanes above(Floats a, Floats b) { return EACH_PART(Lanes, a.part[i] > b.part[i]); }
WORD Lanes at_least(Floats a, Floats b) { return EACH_PART(Lanes, a.part[i] >= b.part[i]); }
WORD Lanes equal(Floats a, Floats b) { return EACH_PART(Lanes, a.part[i] == b.part[i]); }
WORD Lanes unordered(Floats a) { return EACH_PART(Lanes, a.part[i] != a.part[i]); }
WORD Lanes not_finite(Floats a) { return EACH_PART(Lanes, ((IntPart)a.part[i] & 0x7f800000) == 0x7f800000); }
WORD Lanes either(Lanes a, Lanes b) { return EACH_PART(Lanes, a.part[i] | b.part[i]); }
WORD bool any(Lanes lanes) { return joined(lanes, [](auto x, auto y) { return x | y; }); }
WORD bool all(Lanes lanes) { return joined(lanes, [](auto x, auto y) { return x & y; }); }
WORD Floats select(Lanes lanes, Floats a, Floats b) {
  return EACH_PART(Floats, (lanes.part[i] ? a.part[i] : b.part[i]));
}
WORD Ints select(Lanes lanes, Ints a, Ints b) { return EACH_PART(Ints, (lanes.part[i] ? a.part[i] : b.part[i])); }

WORD Floats load_first(const float* p, int64_t n, float missing) {
  if (n >= 16) return load(p);
  float some[16];
  for (int i = 0; i < 16; ++i) some[i] = i < n ? p[i] : missing;
  return load(some);
}
WORD void store_first(float* p, int64_t n, Floats v) { std::memcpy(p, &v, n >= 16 ? 64 : n * sizeof(float)); }

// A bf16 is the upper half of a float.
WORD FloatPart lower(IntPart pairs) { return (FloatPart)(pairs << 16); }
WORD FloatPart upper(IntPart pairs) { return (FloatPart)(pairs & static_cast<int32_t>(0xffff0000)); }
WORD Floats dot_bf16(Floats sum, Ints a, Ints b) {
  return EACH_PART(Floats, upper(a.part[i]) * upper(b.part[i]) +
                               (lower(a.part[i]) * lower(b.part[i]) + sum.part[i]));
}

#if defined(__AVX2__)

// maddubs adds two products in 16 bits: bytes of up to 127 fit, so that weights are taken less 128,
// their sign given to x.
WORD Ints dots_from(int32_t) { return ints(0); }
WORD IntPart dot_part(IntPart dots, IntPart weights, IntPart x) {
  const __m256i less = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8(-128));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8((__m256i)x, less));
  return dots + (IntPart)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
WORD Ints dot_bytes(Ints dots, Ints weights, Ints x) {
  return EACH_PART(Ints, dot_part(dots.part[i], weights.part[i], x.part[i]));
}
// Eight times two products of up to 15 x 127 fit into 16 bits: they are joined at a block's end.
WORD Ints dot_quants(Ints dots, Ints quants, Ints x) {
  return EACH_PART(Ints, (IntPart)_mm256_add_epi16((__m256i)dots.part[i], _mm256_maddubs_epi16((__m256i)quants.part[i],
                                                                                               (__m256i)x.part[i])));
}
WORD Ints told_dots(Ints dots) {
  return EACH_PART(Ints, (IntPart)_mm256_madd_epi16((__m256i)dots.part[i], _mm256_set1_epi16(1)));
}

#else

// Bytes 0 and 2, then 1 and 3, as 16 bits: a product of theirs fits, a sum of two does not.
WORD IntPart add_pairs(IntPart dots, ShortPart a, ShortPart b) {
#if defined(__x86_64__)
  return dots + (IntPart)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const IntPart products = (IntPart)(a * b);
  return dots + (products << 16 >> 16) + (products >> 16);
#endif
}
WORD IntPart dot_part(IntPart dots, IntPart weights, IntPart x) {
  const ShortPart even = (ShortPart)(weights & 0x00ff00ff), odd = (ShortPart)((WordPart)weights >> 8 & 0x00ff00ff);
  const ShortPart even_x = (ShortPart)x << 8 >> 8, odd_x = (ShortPart)x >> 8;
  return add_pairs(add_pairs(dots, even, even_x), odd, odd_x);
}
WORD Ints dots_from(int32_t offset) { return ints(offset); }
WORD Ints dot_bytes(Ints dots, Ints weights, Ints x) {
  return EACH_PART(Ints, dot_part(dots.part[i], weights.part[i], x.part[i]));
}
WORD Ints dot_quants(Ints dots, Ints quants, Ints x) { return dot_bytes(dots, quants, x); }
WORD Ints told_dots(Ints dots) { return dots; }

#endif

WORD void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }
WORD void fetch_near(const void* p) { __builtin_prefetch(p, 0, 2); }

class DoubleSum {
 public:
  void add(Floats v) {
    float values[16];
    store(values, v);
    for (int i = 0; i < 16; ++i) sums_[i] += static_cast<double>(values[i]);
  }
  double total() const {
    double all = 0;
    for (const double one : sums_) all += one;
    return all;
  }

 private:
  double sums_[16] = {};
};
