// Attention of one token over keys and values in int8 (units.h): half the bytes of bf16, of which a
// decode step is made. Queries and weights enter as two digits of 7 bits, so that the cache's own
// rounding is the only loss: with one, a weight below a 250th of its chunk's largest would be none.
#pragma once
#include "attention.h"

constexpr int DIGIT = 128;
constexpr float DIGITS_MOST = 127.f * DIGIT;

// Numbers as 128 x high + low, scaled so that the largest is DIGITS_MOST.
template <int COUNT> struct Digits {
  alignas(64) int8_t high[COUNT], low[COUNT];
  int32_t high_offset, low_offset;  // for dots_from
  float scale;

  // value(i) is the 16 from 16 i on; most is the largest of their sizes.
  template <class Value> void put(int64_t count, float most, const Value& value) {
    const Floats ratio = floats(most > 0 ? DIGITS_MOST / most : 0.f);
    Ints highs = ints(0), lows = ints(0);
    for (int64_t i = 0; i < count / 16; ++i) {
      const Ints whole = round_to_ints(value(i) * ratio), top = whole >> 7, rest = whole & ints(DIGIT - 1);
      store_bytes(high + 16 * i, top);
      store_bytes(low + 16 * i, rest);
      highs = highs + top, lows = lows + rest;
    }
    high_offset = -128 * sum(highs), low_offset = -128 * sum(lows);
    scale = most / DIGITS_MOST;
  }
};

static inline Floats told(Ints high, Ints low) { return fma(to_floats(high), floats(DIGIT), to_floats(low)); }

// As attend_token. A key or a value that is no number makes all of the result none.
template <int G>
static inline void attend_token_int8(const bf16* q, const Sequence& s, int64_t tokens, int64_t first, int64_t last,
                                     const Sequence& next, int64_t next_first, int64_t next_units, Partial& result) {
  constexpr int CHUNK = 8, AHEAD = 8;
  const int64_t dim = s.dim;
  Digits<HEAD_DIM_MAX> queries[G];
  Floats most[G], weight[G], trouble = floats(0);
  for (int g = 0; g < G; ++g) {
    Floats top = floats(0), odd = floats(0);
    for (int64_t d = 0; d < dim; d += 16) {
      const Floats some = load_bf16(q + g * dim + d);
      top = max(top, abs(some)), odd = odd + (some - some);
    }
    queries[g].put(dim, largest(top), [&](int64_t i) { return load_bf16(q + g * dim + 16 * i); });
    most[g] = floats(MASKED), weight[g] = odd;
    std::memset(result.sums[g], 0, dim * sizeof(float));
  }
  const auto later = [&](int64_t unit) {
    return unit < last ? s.unit(unit) : next.unit(next_first + std::min(unit - last, next_units - 1));
  };
  for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
    const int64_t units = std::min<int64_t>(CHUNK, last - chunk);
    Floats scores[CHUNK][G], value_scales[CHUNK];
    for (int64_t j = 0; j < units; ++j) {
      const uint8_t *keys = s.unit(chunk + j), *ahead = later(chunk + j + AHEAD);
      Ints high[G], low[G];
      for (int g = 0; g < G; ++g)
        high[g] = dots_from(queries[g].high_offset), low[g] = dots_from(queries[g].low_offset);
      for (int64_t d = 0; d < dim / 4; ++d) {
        const Ints some = load_ints(keys + d * 64);
        fetch_near(ahead + d * 64);
        for (int g = 0; g < G; ++g) {
          high[g] = dot_bytes(high[g], some, broadcast4(queries[g].high + 4 * d));
          low[g] = dot_bytes(low[g], some, broadcast4(queries[g].low + 4 * d));
        }
      }
      const float* scales = scales_of(keys, dim);
      fetch_near(scales_of(ahead, dim));
      fetch_near(scales_of(ahead, dim) + UNIT_TOKENS);
      const Lanes seen = first_lanes(tokens - (chunk + j) * UNIT_TOKENS);
      const Floats key_scales = select(seen, load(scales), floats(0));
      value_scales[j] = select(seen, load(scales + UNIT_TOKENS), floats(0));
      trouble = trouble + (key_scales - key_scales) + (value_scales[j] - value_scales[j]);
      for (int g = 0; g < G; ++g)
        scores[j][g] = select(seen, told(high[g], low[g]) * (key_scales * floats(queries[g].scale)), floats(MASKED));
    }
    Digits<CHUNK * UNIT_TOKENS> shares[G];
    Floats fade[G];
    for (int g = 0; g < G; ++g) {
      Floats top = scores[0][g], largest_share = floats(0);
      for (int64_t j = 1; j < units; ++j) top = max(top, scores[j][g]);
      top = max(most[g], floats(largest(top)));
      fade[g] = exp2_of(most[g] - top);
      most[g] = top;
      weight[g] = weight[g] * fade[g];
      for (int64_t j = 0; j < units; ++j) {
        const Floats share = exp2_of(scores[j][g] - top);
        weight[g] = weight[g] + share;
        scores[j][g] = share * value_scales[j];
        largest_share = max(largest_share, scores[j][g]);
      }
      shares[g].put(units * UNIT_TOKENS, largest(largest_share), [&](int64_t j) { return scores[j][g]; });
    }
    for (int64_t d = 0; d < dim; d += 16 * HALVES) {
      Ints high[G][HALVES], low[G][HALVES];
      for (int g = 0; g < G; ++g)
        for (int z = 0; z < HALVES; ++z)
          high[g][z] = dots_from(shares[g].high_offset), low[g][z] = dots_from(shares[g].low_offset);
      for (int64_t j = 0; j < units; ++j) {
        const uint8_t* values = s.unit(chunk + j) + dim * UNIT_TOKENS + d * 4;
        const uint8_t* ahead = later(chunk + j + AHEAD) + dim * UNIT_TOKENS + d * 4;
        for (int u = 0; u < UNIT_TOKENS / 4; ++u) {
          Ints some[HALVES];
          for (int z = 0; z < HALVES; ++z) {
            some[z] = load_ints(values + u * dim * 4 + z * 64);
            fetch_near(ahead + u * dim * 4 + z * 64);
          }
          for (int g = 0; g < G; ++g) {
            const Ints top = broadcast4(shares[g].high + j * UNIT_TOKENS + 4 * u);
            const Ints rest = broadcast4(shares[g].low + j * UNIT_TOKENS + 4 * u);
            for (int z = 0; z < HALVES; ++z) {
              high[g][z] = dot_bytes(high[g][z], some[z], top);
              low[g][z] = dot_bytes(low[g][z], some[z], rest);
            }
          }
        }
      }
      for (int g = 0; g < G; ++g)
        for (int z = 0; z < HALVES; ++z) {
          float* sums = result.sums[g] + d + 16 * z;
          store(sums, fma(told(high[g][z], low[g][z]), floats(shares[g].scale), fade[g] * load(sums)));
        }
    }
  }
  for (int g = 0; g < G; ++g) {
    result.most[g] = first_of(most[g]);
    result.weight[g] = sum(weight[g] + trouble);
  }
}
