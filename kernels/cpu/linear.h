// Products y[M, N] = x[M, K] w[N, K]^T of a step's rows with a packed weight, a tile of 32 outputs at
// a time. A tile's weights lie in the order in which they are read. K is a multiple of 32; N is filled
// up with zeros to one. Formats:
//   BF16    [N/32][K/2][32][2] bf16; x in bf16; sums in f32.
//   INT8    [N/32][K/4][32][4] of weight + 128, a scale an output; x in int8 with a scale for 32 inputs.
//           AVX-512 takes the weight as its unsigned side; the 128 is undone exactly by starting each
//           sum at -128 x the sum of the block's x.
//   TURNED  the same of rows that were turned (turn.h); x turned too, with one scale a row.
// A weight whose file had it in 4 bits (four.h) is there in these too, for a step of few rows: that
// takes as long as its weights take to come from memory. It may be there in these alone.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "inputs.h"

constexpr int TILE = 32;  // outputs

struct Weight {
  Form form;
  int64_t outputs, inputs;  // outputs as they are padded
  const void* values;    // null where there are 4 bits alone
  const float* scales;   // [outputs], not of BF16, or null with values
  const uint8_t* fours;  // the same in 4 bits, as the file has it: never turned; or null; not of BF16

  int64_t tiles() const { return outputs / TILE; }
  int64_t tile_bytes() const { return inputs * TILE * (form == BF16 ? 2 : 1); }
  bool reads_fours(int64_t rows) const { return fours && (rows <= FOUR_BITS_ROWS || !values); }
  // The form of input that it reads for so many rows.
  Form form_of(int64_t rows) const { return reads_fours(rows) ? INT8 : form; }
};

// Where the weights lie that are fetched while these rows are computed: several blocks of rows fetch a
// share each of the next tile; one alone reads as fast as the processor fetches by itself.
struct Ahead {
  const char* from;
  int64_t stride;  // a step of 128 bytes of weights
  bool near;       // into the second cache: the first has no room beside the tile

  void fetch(int64_t step) const { near ? fetch_near(from + step * stride) : ::fetch(from + step * stride); }
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
static inline void tile_turned(const Weight& w, const Rows& x, int64_t tile, int64_t m, Ahead ahead, const Each& each) {
  constexpr int Z = halves_of(R);
  const int64_t inputs = w.inputs;
  const uint8_t* weights = static_cast<const uint8_t*>(w.values) + tile * inputs * TILE;
  const int8_t* rows = x.quants + m * inputs;
  const Floats scales[2] = {load(w.scales + tile * TILE), load(w.scales + tile * TILE + 16)};
  by_halves<R>(each, m, [&](int half, Floats(&sums)[R][Z]) {
    Ints dots[R][Z];
    for (int i = 0; i < R; ++i)
      for (int z = 0; z < Z; ++z) dots[i][z] = dots_from(x.offsets[m + i]);
    for (int64_t k = 0; k < inputs / 4; ++k) {
      Ints some[Z];
      for (int z = 0; z < Z; ++z) some[z] = load_ints(weights + k * 128 + (half + z) * 64);
      if (half == 0) ahead.fetch(k);
      for (int i = 0; i < R; ++i) {
        const Ints four = broadcast4(rows + i * inputs + 4 * k);
        for (int z = 0; z < Z; ++z) dots[i][z] = dot_bytes(dots[i][z], some[z], four);
      }
    }
    for (int i = 0; i < R; ++i)
      for (int z = 0; z < Z; ++z)
        sums[i][z] = to_floats(dots[i][z]) * (floats(x.scales[m + i]) * scales[half + z]);
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
      for (int i = 0; i < R; ++i) {
        const Ints four = broadcast4(rows + i * inputs + block * BLOCK + 4 * k);
        dots[i][0] = dot_quants(dots[i][0], low, four);
        dots[i][1] = dot_quants(dots[i][1], high, four);
      }
    }
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

// Call each with `rows`, from 1 to MOST, as a constant.
template <int MOST, class Each> static inline void with_rows(int64_t rows, const Each& each) {
  if constexpr (MOST > 1)
    if (rows < MOST) return with_rows<MOST - 1>(rows, each);
  each(std::integral_constant<int, MOST>{});
}

// Where to fetch from in each of a tile's passes over its rows.
class Aheads {
 public:
  Aheads(const Weight& w, int64_t tile, int64_t passes)
      : here_(static_cast<const char*>(w.values) + tile * w.tile_bytes()), bytes_(w.tile_bytes()), passes_(passes) {}

  Ahead next() {
    if (passes_ == 1) return {here_, 0, false};
    const int64_t part = pass_++;
    return {here_ + bytes_ + bytes_ / passes_ * part, 128 / std::min<int64_t>(passes_, 128), passes_ == 2};
  }

 private:
  const char* here_;
  int64_t bytes_, passes_, pass_ = 0;
};

// Rows in passes that differ by one row at most.
template <class Each>
static inline void multiply_turned(const Weight& w, const Rows& x, int64_t tile, int64_t from, int64_t to,
                                   const Each& each) {
  const int64_t count = to - from, passes = (count + TURNED_ROWS_MOST - 1) / TURNED_ROWS_MOST;
  Aheads aheads(w, tile, passes);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t m = from + count * pass / passes, rows = from + count * (pass + 1) / passes - m;
    with_rows<TURNED_ROWS_MOST>(
        rows, [&](auto fixed) { tile_turned<decltype(fixed)::value>(w, x, tile, m, aheads.next(), each); });
  }
}

// One tile of outputs for the rows from..to.
template <class Each>
static inline void multiply_tile(const Weight& w, const Rows& x, int64_t tile, int64_t from, int64_t to,
                                 const Each& each) {
  const bool fours = w.fours && (x.few || !w.values);
  if (w.form == TURNED && !fours) return multiply_turned(w, x, tile, from, to, each);
  const int64_t count = to - from;
  Aheads aheads(w, tile, count / ROWS_MOST + __builtin_popcountll(count % ROWS_MOST));
  int64_t m = from;
  const auto go = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    if (fours)
      tile_int4<R>(w, x, tile, m, each);
    else if (w.form == BF16)
      tile_bf16<R>(w, x, tile, m, aheads.next(), each);
    else
      tile_int8<R>(w, x, tile, m, aheads.next(), each);
    m += R;
  };
  while (m + ROWS_MOST <= to) go(std::integral_constant<int, ROWS_MOST>{});
  if constexpr (ROWS_MOST > 4)
    if (m + 4 <= to) go(std::integral_constant<int, 4>{});
  if constexpr (ROWS_MOST > 2)
    if (m + 2 <= to) go(std::integral_constant<int, 2>{});
  if (m < to) go(std::integral_constant<int, 1>{});
}
