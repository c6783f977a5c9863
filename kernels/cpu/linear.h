// Products y[M, N] = x[M, K] w[N, K]^T of a step's rows with a packed weight, a tile of 32 outputs at
// a time. A tile's weights lie in the order in which they are read. K is a multiple of 32; N is filled
// up with zeros to one. Formats:
//   BF16  [N/32][K/2][32][2] bf16; x in bf16; sums in f32.
//   INT8  [N/32][K/4][32][4] of weight + 128, a scale an output; x in int8 with a scale for 32 inputs.
//         AVX-512 takes the weight as its unsigned side; the 128 is undone exactly by starting each
//         sum at -128 x the sum of the block's x.
// A weight whose file had it in 4 bits (four.h) is there in these too, for a step of few rows: that
// takes as long as its weights take to come from memory. It may be there in these alone.
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
  const void* values;    // null where there are 4 bits alone
  const float* scales;   // [outputs], INT8 only, or null with values
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
  void store(int64_t m, int64_t k, Floats low, Floats high) const {
    if (format == BF16) {
      store_bf16(values + m * inputs + k, low);
      store_bf16(values + m * inputs + k + 16, high);
      return;
    }
    const float most = largest(max(abs(low), abs(high)));
    const Floats ratio = floats(most > 0 ? 127.f / most : 0.f);
    const Ints a = round_to_ints(low * ratio), b = round_to_ints(high * ratio);
    store_bytes(quants + m * inputs + k, a);
    store_bytes(quants + m * inputs + k + 16, b);
    const int64_t at = (m * inputs + k) / BLOCK;
    // One value that is no number makes the block none, and with it the row: max would hide it.
    scales[at] = any(either(not_finite(low), not_finite(high))) ? NAN : most / 127.f;
    offsets[at] = -128 * sum(a + b);
  }

  void store_row(int64_t m, const float* row) const {
    for (int64_t k = 0; k < inputs; k += 32)
      store(m, k, load(row + k), load(row + k + 16));
  }
};

// Where the weights lie that are fetched while these rows are computed: one block of rows fetches a
// little ahead of itself, several fetch a share each of the next tile.
struct Ahead {
  const char* from;
  int64_t stride;  // a step of 128 bytes of weights
  int64_t second;  // to the other cache line, 0 where there is none

  void fetch(int64_t step) const {
    ::fetch(from + step * stride);
    ::fetch(from + step * stride + second);
  }
};

// How many halves of a tile the registers hold at a time, for so many rows.
constexpr int halves_of(int rows) { return 2 * rows <= ROWS_MOST * HALVES ? 2 : 1; }

// Sum a tile's two halves: add(half, sums) for R rows from row m on; each(m, low, high) gets the 32
// sums of a row.
template <int R, class Each, class Add> static inline void by_halves(const Each& each, int64_t m, const Add& add) {
  constexpr int Z = halves_of(R);
  Floats all[R][2];
  for (int half = 0; half < 2; half += Z) {
    Floats sums[R][Z];
    for (int i = 0; i < R; ++i)
      for (int z = 0; z < Z; ++z) sums[i][z] = floats(0);
    add(half, sums);
    for (int i = 0; i < R; ++i)
      for (int z = 0; z < Z; ++z) all[i][half + z] = sums[i][z];
  }
  for (int i = 0; i < R; ++i) each(m + i, all[i][0], all[i][1]);
}

template <int R, class Each>
static inline void tile_bf16(const Weight& w, const Rows& x, int64_t tile, int64_t m, Ahead ahead, const Each& each) {
  constexpr int Z = halves_of(R);
  const int64_t inputs = w.inputs;
  const bf16* weights = static_cast<const bf16*>(w.values) + tile * inputs * TILE;
  const bf16* rows = x.values + m * inputs;
  by_halves<R>(each, m, [&](int half, Floats(&sums)[R][Z]) {
    for (int64_t k = 0; k < inputs / 2; ++k) {
      Ints some[Z];
      for (int z = 0; z < Z; ++z) some[z] = load_ints(weights + k * 64 + (half + z) * 32);
      if (half == 0) ahead.fetch(k);
      for (int i = 0; i < R; ++i) {
        const Ints pair = broadcast4(rows + i * inputs + 2 * k);
        for (int z = 0; z < Z; ++z) sums[i][z] = dot_bf16(sums[i][z], pair, some[z]);
      }
    }
  });
}

template <int R, class Each>
static inline void tile_int8(const Weight& w, const Rows& x, int64_t tile, int64_t m, Ahead ahead, const Each& each) {
  constexpr int Z = halves_of(R);
  const int64_t inputs = w.inputs, blocks = inputs / BLOCK;
  const uint8_t* weights = static_cast<const uint8_t*>(w.values) + tile * inputs * TILE;
  const int8_t* rows = x.quants + m * inputs;
  const Floats low = load(w.scales + tile * TILE), high = load(w.scales + tile * TILE + 16);
  const auto scaled = [&](int64_t row, Floats a, Floats b) { each(row, a * low, b * high); };
  by_halves<R>(scaled, m, [&](int half, Floats(&sums)[R][Z]) {
    for (int64_t block = 0; block < blocks; ++block) {
      Ints dots[R][Z];
      for (int i = 0; i < R; ++i)
        for (int z = 0; z < Z; ++z) dots[i][z] = dots_from(x.offsets[(m + i) * blocks + block]);
#pragma GCC unroll 8
      for (int k = 0; k < BLOCK / 4; ++k) {
        const uint8_t* at = weights + (block * (BLOCK / 4) + k) * 128 + half * 64;
        Ints some[Z];
        for (int z = 0; z < Z; ++z) some[z] = load_ints(at + z * 64);
        if (half == 0) ahead.fetch(block * (BLOCK / 4) + k);
        for (int i = 0; i < R; ++i) {
          const Ints four = broadcast4(rows + i * inputs + block * BLOCK + 4 * k);
          for (int z = 0; z < Z; ++z) dots[i][z] = dot_bytes(dots[i][z], some[z], four);
        }
      }
      for (int i = 0; i < R; ++i) {
        const Floats scale = floats(x.scales[(m + i) * blocks + block]);
        for (int z = 0; z < Z; ++z) sums[i][z] = fma(to_floats(dots[i][z]), scale, sums[i][z]);
      }
    }
  });
}

template <int R, class Each>
static inline void tile_int4(const Weight& w, const Rows& x, int64_t tile, int64_t m, const Each& each) {
  const int64_t inputs = w.inputs, blocks = inputs / BLOCK;
  const uint8_t* at = w.fours + tile * blocks * FOUR_BYTES;
  const int8_t* rows = x.quants + m * inputs;
  const Ints nibble = ints(0x0f0f0f0f);
  Floats sums[R][2];
  for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = floats(0);
  for (int64_t block = 0; block < blocks; ++block, at += FOUR_BYTES) {
    Ints dots[R][2];
    for (int i = 0; i < R; ++i) dots[i][0] = dots[i][1] = ints(0);
#pragma GCC unroll 8
    for (int k = 0; k < BLOCK / 4; ++k) {
      const Ints both = load_ints(at + k * 64);
      const Ints low = both & nibble, high = both >> 4 & nibble;
      fetch(at + k * 64 + 2560);
      for (int i = 0; i < R; ++i) {
        const Ints four = broadcast4(rows + i * inputs + block * BLOCK + 4 * k);
        dots[i][0] = dot_quants(dots[i][0], low, four);
        dots[i][1] = dot_quants(dots[i][1], high, four);
      }
    }
    fetch(at + 512 + 2560);
    fetch(at + 576 + 2560);
    for (int i = 0; i < R; ++i) {
      const int64_t of = (m + i) * blocks + block;
      const Floats scale = floats(x.scales[of]), sum = floats(x.scales[of] * (x.offsets[of] / -128));
      for (int half = 0; half < 2; ++half) {
        const Floats steps = load_half(at + 512 + half * 32), least = load_half(at + 576 + half * 32);
        sums[i][half] = fma(least, sum, sums[i][half]);
        sums[i][half] = fma(to_floats(told_dots(dots[i][half])), steps * scale, sums[i][half]);
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
  const int64_t passes = count / ROWS_MOST + __builtin_popcountll(count % ROWS_MOST);
  int64_t pass = 0;
  const auto ahead = [&]() -> Ahead {
    if (passes == 1) return {here + 2048, 128, 64};
    const int64_t part = pass++;
    return {here + bytes + bytes / passes * part, 128 / std::min<int64_t>(passes, 128), 0};
  };
  int64_t m = from;
  const auto go = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    if (w.fours && (x.few || !w.values))
      tile_int4<R>(w, x, tile, m, each);
    else if (w.format == BF16)
      tile_bf16<R>(w, x, tile, m, ahead(), each);
    else
      tile_int8<R>(w, x, tile, m, ahead(), each);
    m += R;
  };
  while (m + ROWS_MOST <= to) go(std::integral_constant<int, ROWS_MOST>{});
  if constexpr (ROWS_MOST > 4)
    if (m + 4 <= to) go(std::integral_constant<int, 4>{});
  if constexpr (ROWS_MOST > 2)
    if (m + 2 <= to) go(std::integral_constant<int, 2>{});
  if (m < to) go(std::integral_constant<int, 1>{});
}
