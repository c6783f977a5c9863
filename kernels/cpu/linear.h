// Products y[M, N] = x[M, K] w[N, K]^T of a step's rows with a packed weight, a tile of 32 outputs at
// a time. A tile's weights lie in the order in which they are read. K is a multiple of 32; N is filled
// up with zeros to one. Formats:
//   BF16  [N/32][K/2][32][2] bf16; x in bf16; sums in f32 (dpbf16ps).
//   INT8  [N/32][K/4][32][4] of weight + 128, a scale an output; x in int8 with a scale for 32 inputs.
//         dpbusd takes the weight as its unsigned side; the 128 is undone exactly by starting each sum
//         at -128 x the sum of the block's x.
// A weight whose file had it in 4 bits (four.h) is there in these too, for a step of few rows: that
// takes as long as its weights take to come from memory.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "four.h"
#include "simd.h"

constexpr int TILE = 32;         // outputs
constexpr int FOUR_BITS_ROWS = 3;  // up to which the 4 bits are read

enum Format { BF16 = 0, INT8 = 1 };

struct Weight {
  Format format;
  int64_t outputs, inputs;  // outputs as they are padded
  const void* values;
  const float* scales;   // [outputs], INT8 only
  const uint8_t* fours;  // the same in 4 bits, or null; INT8 only

  int64_t tiles() const { return outputs / TILE; }
  int64_t tile_bytes() const { return inputs * TILE * (format == BF16 ? 2 : 1); }
};

// Rows of input in the form that a format reads.
struct Rows {
  Format format;
  bool few;  // whether there are few enough for 4 bits
  int64_t inputs;
  bf16* values;      // BF16: [M][K]
  int8_t* quants;    // INT8: [M][K]
  float* scales;     // INT8: [M][K / 32]
  int32_t* offsets;  // INT8: [M][K / 32], -128 x the sum of the block's quants

  // Store 32 values of row m from input k on.
  void store(int64_t m, int64_t k, __m512 low, __m512 high) const {
    if (format == BF16) {
      store_bf16(values + m * inputs + k, low);
      store_bf16(values + m * inputs + k + 16, high);
      return;
    }
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const __m512 ratio = _mm512_set1_ps(most > 0 ? 127.f / most : 0.f);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, ratio));
    const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(high, ratio));
    int8_t* q = quants + m * inputs + k;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(b));
    const int64_t at = (m * inputs + k) / BLOCK;
    // One value that is no number makes the block none, and with it the row: max would hide it.
    constexpr int NO_NUMBER = 0x99;  // NaN, quiet or not, and infinity of either sign
    const bool odd = _mm512_fpclass_ps_mask(low, NO_NUMBER) | _mm512_fpclass_ps_mask(high, NO_NUMBER);
    scales[at] = odd ? NAN : most / 127.f;
    offsets[at] = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  }

  void store_row(int64_t m, const float* row) const {
    for (int64_t k = 0; k < inputs; k += 32)
      store(m, k, _mm512_loadu_ps(row + k), _mm512_loadu_ps(row + k + 16));
  }
};

// Where the weights lie that are fetched while these rows are computed: one block of rows fetches a
// little ahead of itself, several fetch a share each of the next tile.
struct Ahead {
  const char* from;
  int64_t stride;  // a step of 128 bytes of weights
  int64_t second;  // to the other cache line, 0 where there is none

  void fetch(int64_t step) const {
    _mm_prefetch(from + step * stride, _MM_HINT_T0);
    _mm_prefetch(from + step * stride + second, _MM_HINT_T0);
  }
};

// R rows from m on; each(m, low, high) gets the 32 sums of a row.
template <int R, class Each>
static inline void tile_bf16(const Weight& w, const Rows& x, int64_t tile, int64_t m, Ahead ahead, const Each& each) {
  const int64_t inputs = w.inputs;
  const bf16* weights = static_cast<const bf16*>(w.values) + tile * inputs * TILE;
  const bf16* rows = x.values + m * inputs;
  __m512 sums[R][2];
  for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs / 2; ++k) {
    const __m512i low = _mm512_loadu_si512(weights + k * 64), high = _mm512_loadu_si512(weights + k * 64 + 32);
    ahead.fetch(k);
    for (int i = 0; i < R; ++i) {
      const __m512i pair = broadcast4(rows + i * inputs + 2 * k);
      sums[i][0] = dot_bf16(sums[i][0], pair, low);
      sums[i][1] = dot_bf16(sums[i][1], pair, high);
    }
  }
  for (int i = 0; i < R; ++i) each(m + i, sums[i][0], sums[i][1]);
}

template <int R, class Each>
static inline void tile_int8(const Weight& w, const Rows& x, int64_t tile, int64_t m, Ahead ahead, const Each& each) {
  const int64_t inputs = w.inputs, blocks = inputs / BLOCK;
  const uint8_t* weights = static_cast<const uint8_t*>(w.values) + tile * inputs * TILE;
  const int8_t* rows = x.quants + m * inputs;
  __m512 sums[R][2];
  for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block) {
    __m512i dots[R][2];
    for (int i = 0; i < R; ++i)
      dots[i][0] = dots[i][1] = _mm512_set1_epi32(x.offsets[(m + i) * blocks + block]);
#pragma GCC unroll 8
    for (int k = 0; k < BLOCK / 4; ++k) {
      const uint8_t* at = weights + (block * (BLOCK / 4) + k) * 128;
      const __m512i low = _mm512_loadu_si512(at), high = _mm512_loadu_si512(at + 64);
      ahead.fetch(block * (BLOCK / 4) + k);
      for (int i = 0; i < R; ++i) {
        const __m512i four = broadcast4(rows + i * inputs + block * BLOCK + 4 * k);
        dots[i][0] = _mm512_dpbusd_epi32(dots[i][0], low, four);
        dots[i][1] = _mm512_dpbusd_epi32(dots[i][1], high, four);
      }
    }
    for (int i = 0; i < R; ++i) {
      const __m512 scale = _mm512_set1_ps(x.scales[(m + i) * blocks + block]);
      sums[i][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i][0]), scale, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i][1]), scale, sums[i][1]);
    }
  }
  const __m512 low = _mm512_loadu_ps(w.scales + tile * TILE), high = _mm512_loadu_ps(w.scales + tile * TILE + 16);
  for (int i = 0; i < R; ++i) each(m + i, _mm512_mul_ps(sums[i][0], low), _mm512_mul_ps(sums[i][1], high));
}

template <int R, class Each>
static inline void tile_int4(const Weight& w, const Rows& x, int64_t tile, int64_t m, const Each& each) {
  const int64_t inputs = w.inputs, blocks = inputs / BLOCK;
  const uint8_t* at = w.fours + tile * blocks * FOUR_BYTES;
  const int8_t* rows = x.quants + m * inputs;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 sums[R][2];
  for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; ++block, at += FOUR_BYTES) {
    __m512i dots[R][2];
    for (int i = 0; i < R; ++i) dots[i][0] = dots[i][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int k = 0; k < BLOCK / 4; ++k) {
      const __m512i both = _mm512_loadu_si512(at + k * 64);
      const __m512i low = _mm512_and_si512(both, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      _mm_prefetch(at + k * 64 + 2560, _MM_HINT_T0);
      for (int i = 0; i < R; ++i) {
        const __m512i four = broadcast4(rows + i * inputs + block * BLOCK + 4 * k);
        dots[i][0] = _mm512_dpbusd_epi32(dots[i][0], low, four);
        dots[i][1] = _mm512_dpbusd_epi32(dots[i][1], high, four);
      }
    }
    _mm_prefetch(at + 512 + 2560, _MM_HINT_T0);
    _mm_prefetch(at + 576 + 2560, _MM_HINT_T0);
    for (int i = 0; i < R; ++i) {
      const int64_t of = (m + i) * blocks + block;
      const __m512 scale = _mm512_set1_ps(x.scales[of]), sum = _mm512_set1_ps(x.scales[of] * (x.offsets[of] / -128));
      for (int half = 0; half < 2; ++half) {
        const __m512 steps = load_half(at + 512 + half * 32), least = load_half(at + 576 + half * 32);
        sums[i][half] = _mm512_fmadd_ps(least, sum, sums[i][half]);
        sums[i][half] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i][half]), _mm512_mul_ps(steps, scale), sums[i][half]);
      }
    }
  }
  for (int i = 0; i < R; ++i) each(m + i, sums[i][0], sums[i][1]);
}

// One tile of outputs for the rows from..to.
template <class Each>
static inline void multiply_tile(const Weight& w, const Rows& x, int64_t tile, int64_t from, int64_t to,
                                 const Each& each) {
  const int64_t bytes = w.tile_bytes(), count = to - from;
  const char* here = static_cast<const char*>(w.values) + tile * bytes;
  const int64_t passes = count / 8 + (count >> 2 & 1) + (count >> 1 & 1) + (count & 1);
  int64_t pass = 0;
  const auto ahead = [&]() -> Ahead {
    if (passes == 1) return {here + 2048, 128, 64};
    const int64_t part = pass++;
    return {here + bytes + bytes / passes * part, 128 / std::min<int64_t>(passes, 128), 0};
  };
  int64_t m = from;
  const auto go = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    if (w.fours && x.few)
      tile_int4<R>(w, x, tile, m, each);
    else if (w.format == BF16)
      tile_bf16<R>(w, x, tile, m, ahead(), each);
    else
      tile_int8<R>(w, x, tile, m, ahead(), each);
    m += R;
  };
  while (m + 8 <= to) go(std::integral_constant<int, 8>{});
  if (m + 4 <= to) go(std::integral_constant<int, 4>{});
  if (m + 2 <= to) go(std::integral_constant<int, 2>{});
  if (m < to) go(std::integral_constant<int, 1>{});
}
