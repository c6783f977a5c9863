// Paged attention: softmax in base 2 as scores come (Milakov and Gimelshein, 2018), heads of a group
// reading keys and values once. One token over units in bf16 (attention8.h has those in int8), and
// tiles of several tokens over either: a tile widens what is in int8 before it reads it.
#pragma once
#include <algorithm>

#include "units.h"

constexpr int GROUP_MAX = 4;  // query heads that one pass serves; larger groups take several
constexpr float MASKED = -1e30f;

// What attention over some of a sequence's units gave: to be merged and divided by the sum of weights.
struct Partial {
  float most[GROUP_MAX], weight[GROUP_MAX];
  alignas(64) float sums[GROUP_MAX][HEAD_DIM_MAX];
};

// Join `count` partials of G heads into out [G][D], one behind the other.
template <int G> static inline void merge(const Partial* parts, int64_t count, int64_t dim, float* out) {
  for (int g = 0; g < G; ++g) {
    float most = MASKED, total = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, parts[i].most[g]);
    float shares[64];
    for (int64_t i = 0; i < count; ++i) {
      shares[i] = exp2f(parts[i].most[g] - most);
      total += shares[i] * parts[i].weight[g];
    }
    for (int64_t d = 0; d < dim; d += 16) {
      Floats sum = floats(0);
      for (int64_t i = 0; i < count; ++i)
        sum = fma(floats(shares[i]), load(parts[i].sums[g] + d), sum);
      store(out + g * dim + d, sum * floats(1.f / total));
    }
  }
}

// One query token of G heads of a group, q [G][D], over units first..last of a sequence of `tokens`.
// Queries are multiplied by log2(e) / sqrt(D). `next` is fetched towards the end: what this thread
// reads after this.
template <int G>
static inline void attend_token(const bf16* q, const Sequence& s, int64_t tokens, int64_t first, int64_t last,
                                const Sequence& next, int64_t next_first, int64_t next_units, Partial& result) {
  constexpr int CHUNK = 4, AHEAD = 4;  // units; fetching into L1 would push out the chunk at work
  const int64_t dim = s.dim;
  Floats most[G], weight[G];
  for (int g = 0; g < G; ++g) {
    most[g] = floats(MASKED), weight[g] = floats(0);
    std::memset(result.sums[g], 0, dim * sizeof(float));
  }
  const auto later = [&](int64_t unit) {
    if (unit < last) return s.keys(unit);
    return next.keys(next_first + std::min(unit - last, next_units - 1));
  };
  for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
    const int64_t units = std::min<int64_t>(CHUNK, last - chunk);
    Floats scores[CHUNK][G];
    for (int64_t j = 0; j < units; ++j) {
      const bf16 *keys = s.keys(chunk + j), *ahead = later(chunk + j + AHEAD);
      Floats even[G], odd[G];
      for (int g = 0; g < G; ++g) even[g] = odd[g] = floats(0);
      for (int64_t d = 0; d < dim / 2; d += 2) {
        const Ints low = load_ints(keys + d * 32), high = load_ints(keys + d * 32 + 32);
        fetch_near(ahead + d * 32);
        fetch_near(ahead + d * 32 + 32);
        for (int g = 0; g < G; ++g) {
          Floats& other = CHAINS == 2 ? odd[g] : even[g];
          even[g] = dot_bf16(even[g], low, broadcast4(q + g * dim + 2 * d));
          other = dot_bf16(other, high, broadcast4(q + g * dim + 2 * d + 2));
        }
      }
      const Lanes seen = first_lanes(tokens - (chunk + j) * UNIT_TOKENS);
      for (int g = 0; g < G; ++g) scores[j][g] = select(seen, even[g] + odd[g], floats(MASKED));
    }
    alignas(64) bf16 shares[G][CHUNK * UNIT_TOKENS];
    Floats fade[G];
    for (int g = 0; g < G; ++g) {
      Floats top = scores[0][g];
      for (int64_t j = 1; j < units; ++j) top = max(top, scores[j][g]);
      top = max(most[g], floats(largest(top)));
      fade[g] = exp2_of(most[g] - top);
      most[g] = top;
      weight[g] = weight[g] * fade[g];
      for (int64_t j = 0; j < units; ++j) {
        const Floats share = exp2_of(scores[j][g] - top);
        weight[g] = weight[g] + share;
        store_bf16(shares[g] + j * UNIT_TOKENS, share);
      }
    }
    for (int64_t d = 0; d < dim; d += 16 * HALVES) {
      Floats sums[G][HALVES];
      for (int g = 0; g < G; ++g)
        for (int z = 0; z < HALVES; ++z) sums[g][z] = fade[g] * load(result.sums[g] + d + 16 * z);
      for (int64_t j = 0; j < units; ++j) {
        const bf16* values = s.values(chunk + j) + d * 2;
        const bf16* ahead = later(chunk + j + AHEAD) + dim * UNIT_TOKENS + d * 2;
        for (int u = 0; u < UNIT_TOKENS / 2; ++u) {
          Ints some[HALVES];
          for (int z = 0; z < HALVES; ++z) {
            some[z] = load_ints(values + u * dim * 2 + z * 32);
            fetch_near(ahead + u * dim * 2 + z * 32);
          }
          for (int g = 0; g < G; ++g) {
            const Ints pair = broadcast4(shares[g] + j * UNIT_TOKENS + 2 * u);
            for (int z = 0; z < HALVES; ++z) sums[g][z] = dot_bf16(sums[g][z], pair, some[z]);
          }
        }
      }
      for (int g = 0; g < G; ++g)
        for (int z = 0; z < HALVES; ++z) store(result.sums[g] + d + 16 * z, sums[g][z]);
    }
  }
  for (int g = 0; g < G; ++g) {
    result.most[g] = first_of(most[g]);
    result.weight[g] = sum(weight[g]);
  }
}

// Several query tokens at positions p .. p + count - 1 of a sequence, each seeing what stands up to
// itself; their G heads are rows of one tile, so that keys and values are read once for all.
constexpr int TILE_ROWS = 48;
constexpr int TILE_UNITS = 8;

struct Tile {  // memory of one thread
  alignas(64) bf16 q[TILE_ROWS][HEAD_DIM_MAX];
  alignas(64) bf16 shares[TILE_ROWS][TILE_UNITS * UNIT_TOKENS];
  alignas(64) float scores[TILE_ROWS][TILE_UNITS * UNIT_TOKENS];
  alignas(64) float sums[TILE_ROWS][HEAD_DIM_MAX];
  alignas(64) bf16 wide[TILE_UNITS * 2 * UNIT_TOKENS * HEAD_DIM_MAX];  // units that were int8,
  alignas(64) float key_scales[TILE_UNITS * UNIT_TOKENS], value_scales[TILE_UNITS * UNIT_TOKENS];  // and theirs
  float most[TILE_ROWS], weight[TILE_ROWS], fade[TILE_ROWS];

  // Query tokens that fit, for G heads each.
  static int64_t tokens(int64_t group) { return TILE_ROWS / group; }
};

// Scores of ROWS_MOST rows with HALVES units' keys, into scores[row][at ..].
static inline void score_rows(Tile& tile, int64_t row, const bf16* first, const bf16* second, int64_t dim, int64_t at) {
  const bf16* keys[2] = {first, second};
  Floats sums[ROWS_MOST][HALVES];
  for (auto& sum : sums)
    for (auto& half : sum) half = floats(0);
  for (int64_t d = 0; d < dim / 2; ++d) {
    Ints some[HALVES];
    for (int z = 0; z < HALVES; ++z) some[z] = load_ints(keys[z] + d * 32);
    for (int i = 0; i < ROWS_MOST; ++i) {
      const Ints pair = broadcast4(tile.q[row + i] + 2 * d);
      for (int z = 0; z < HALVES; ++z) sums[i][z] = dot_bf16(sums[i][z], pair, some[z]);
    }
  }
  for (int i = 0; i < ROWS_MOST; ++i)
    for (int z = 0; z < HALVES; ++z) store(tile.scores[row + i] + at + 16 * z, sums[i][z]);
}

// Weights of one row, which sees `seen` tokens of this chunk of `units`. What was int8 is scaled here.
template <bool INT8> static inline void weigh_row(Tile& tile, int64_t row, int64_t units, int64_t seen) {
  Floats top = floats(tile.most[row]), scores[TILE_UNITS];
  for (int64_t j = 0; j < units; ++j) {
    Floats all = load(tile.scores[row] + 16 * j);
    if constexpr (INT8) all = all * load(tile.key_scales + 16 * j);
    scores[j] = select(first_lanes(seen - 16 * j), all, floats(MASKED));
    top = max(top, scores[j]);
  }
  const float most = largest(top);
  Floats weight = floats(0);
  for (int64_t j = 0; j < units; ++j) {
    const Lanes lanes = first_lanes(seen - 16 * j);
    Floats share = select(lanes, exp2_of(scores[j] - floats(most)), floats(0));
    weight = weight + share;
    if constexpr (INT8) share = select(lanes, share * load(tile.value_scales + 16 * j), floats(0));
    store_bf16(tile.shares[row] + 16 * j, share);
  }
  tile.fade[row] = exp2f(tile.most[row] - most);
  tile.most[row] = most;
  tile.weight[row] = tile.weight[row] * tile.fade[row] + sum(weight);
}

// Add ROWS_MOST rows' weights times the values of this chunk's units, 16 x HALVES of D from d on.
static inline void gather_rows(Tile& tile, int64_t row, const Sequence& s, int64_t chunk, int64_t units, int64_t d) {
  Floats sums[ROWS_MOST][HALVES];
  for (int i = 0; i < ROWS_MOST; ++i)
    for (int z = 0; z < HALVES; ++z)
      sums[i][z] = floats(tile.fade[row + i]) * load(tile.sums[row + i] + d + 16 * z);
  for (int64_t j = 0; j < units; ++j) {
    const bf16* values = s.values(chunk + j) + d * 2;
    for (int u = 0; u < UNIT_TOKENS / 2; ++u) {
      Ints some[HALVES];
      for (int z = 0; z < HALVES; ++z) some[z] = load_ints(values + u * s.dim * 2 + z * 32);
      for (int i = 0; i < ROWS_MOST; ++i) {
        const Ints pair = broadcast4(tile.shares[row + i] + j * 16 + 2 * u);
        for (int z = 0; z < HALVES; ++z) sums[i][z] = dot_bf16(sums[i][z], pair, some[z]);
      }
    }
  }
  for (int i = 0; i < ROWS_MOST; ++i)
    for (int z = 0; z < HALVES; ++z) store(tile.sums[row + i] + d + 16 * z, sums[i][z]);
}

// Bring `units` units from `chunk` on to bf16; return them as a sequence of so many.
static inline Sequence widened(Tile& tile, const Sequence& s, int64_t chunk, int64_t units) {
  static constexpr int32_t NUMBERS[TILE_UNITS] = {0, 1, 2, 3, 4, 5, 6, 7};
  const int64_t values = 2 * UNIT_TOKENS * s.dim;
  for (int64_t j = 0; j < units; ++j)
    widen(s.unit(chunk + j), s.dim, tile.wide + j * values, tile.key_scales + 16 * j, tile.value_scales + 16 * j);
  return {reinterpret_cast<const uint8_t*>(tile.wide), NUMBERS, values * 2, s.dim};
}

// q and out: token t's heads at t x stride, head g at g x D. The first token is at `position`.
template <bool INT8>
static inline void attend_tokens(Tile& tile, const bf16* q, float* out, int64_t stride, int64_t group, int64_t count,
                                 const Sequence& s, int64_t position) {
  const int64_t dim = s.dim, rows = count * group, padded = (rows + ROWS_MOST - 1) / ROWS_MOST * ROWS_MOST;
  for (int64_t r = 0; r < padded; ++r) {
    if (r < rows)
      std::memcpy(tile.q[r], q + r / group * stride + r % group * dim, dim * sizeof(bf16));
    else
      std::memset(tile.q[r], 0, dim * sizeof(bf16));
    std::memset(tile.sums[r], 0, dim * sizeof(float));
    tile.most[r] = MASKED, tile.weight[r] = 0;
  }
  const int64_t units_all = (position + count - 1) / UNIT_TOKENS + 1;
  for (int64_t chunk = 0; chunk < units_all; chunk += TILE_UNITS) {
    const int64_t units = std::min<int64_t>(TILE_UNITS, units_all - chunk), first = INT8 ? 0 : chunk;
    const Sequence from = INT8 ? widened(tile, s, chunk, units) : s;
    for (int64_t j = 0; j < units; j += HALVES)
      for (int64_t r = 0; r < padded; r += ROWS_MOST)
        score_rows(tile, r, from.keys(first + j), from.keys(first + std::min(j + 1, units - 1)), dim, j * 16);
    for (int64_t r = 0; r < padded; ++r)
      weigh_row<INT8>(tile, r, units, position + std::min(r / group, count - 1) + 1 - chunk * UNIT_TOKENS);
    for (int64_t r = 0; r < padded; r += ROWS_MOST)
      for (int64_t d = 0; d < dim; d += 16 * HALVES) gather_rows(tile, r, from, first, units, d);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Floats share = floats(1.f / tile.weight[r]);
    for (int64_t d = 0; d < dim; d += 16)
      store(out + r / group * stride + r % group * dim + d, share * load(tile.sums[r] + d));
  }
}
