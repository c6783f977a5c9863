// How keys and values lie in the paged cache: units of 16 tokens of one key head, in the order in which
// dot products read them.
//   bf16  K [D/2 pairs][16 tokens][2], then V [8 token pairs][D][2].
//   int8  K [D/4][16 tokens][4] of key + 128, then V [4 token quads][D][4] of value + 128, then in
//         float32 the scales of 16 keys and of 16 values: the largest of the head's over 127.
// A cache in bf16 must be zeroed once: what is masked is multiplied by 0, and 0 x NaN is NaN. In int8
// what is no number is in the scales alone, which are masked themselves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"

constexpr int UNIT_TOKENS = 16;
constexpr int HEAD_DIM_MAX = 256;

static inline int64_t unit_bytes(int64_t dim, bool int8) {
  return int8 ? 2 * UNIT_TOKENS * (dim + sizeof(float)) : 2 * UNIT_TOKENS * dim * sizeof(bf16);
}

// The units of one sequence and key head.
struct Sequence {
  const uint8_t* cache;  // of this layer and head
  const int32_t* units;  // which unit holds tokens 16 i .. 16 i + 15
  int64_t stride;        // bytes from one unit to the next
  int64_t dim;

  const uint8_t* unit(int64_t i) const { return cache + units[i] * stride; }
  const bf16* keys(int64_t i) const { return reinterpret_cast<const bf16*>(unit(i)); }
  const bf16* values(int64_t i) const { return keys(i) + dim * UNIT_TOKENS; }
};

// Of a unit in int8: scales of its keys, and of its values behind them.
inline const float* scales_of(const uint8_t* unit, int64_t dim) {
  return reinterpret_cast<const float*>(unit + 2 * UNIT_TOKENS * dim);
}

// Put one token's key and value, f32 [D] each, at `offset` of a unit in bf16.
static inline void store_bf16_kv(uint8_t* to, int64_t offset, int64_t dim, const float* key, const float* value) {
  bf16* unit = reinterpret_cast<bf16*>(to);
  alignas(64) bf16 narrow[HEAD_DIM_MAX];
  for (int64_t d = 0; d < dim; d += 16) store_bf16(narrow + d, load(key + d));
  int32_t pair;
  for (int64_t d = 0; d < dim / 2; ++d) {
    std::memcpy(&pair, narrow + 2 * d, sizeof pair);
    std::memcpy(unit + (d * UNIT_TOKENS + offset) * 2, &pair, sizeof pair);
  }
  bf16* row = unit + dim * UNIT_TOKENS + offset / 2 * dim * 2;
  for (int64_t d = 0; d < dim; d += 16) store_bf16_apart(row + d * 2 + (offset & 1), load(value + d));
}

// Give each 16 of x + 128 in int8 to put(d, bytes in lanes); return the scale, NaN if one is no number.
template <class Put> static inline float to_int8(const float* x, int64_t dim, const Put& put) {
  Floats most = floats(0);
  Lanes odd = above(most, most);
  for (int64_t d = 0; d < dim; d += 16) {
    const Floats some = load(x + d);
    most = max(most, abs(some));
    odd = either(odd, not_finite(some));  // max would hide it
  }
  const float top = largest(most);
  const Floats ratio = floats(top > 0 ? 127.f / top : 0.f);
  for (int64_t d = 0; d < dim; d += 16) put(d, round_to_ints(load(x + d) * ratio) + ints(128));
  return any(odd) ? NAN : top / 127.f;
}

// The same in int8. Bytes between a value's are other tokens', which other threads may write.
static inline void store_int8_kv(uint8_t* unit, int64_t offset, int64_t dim, const float* key, const float* value) {
  alignas(64) int8_t narrow[HEAD_DIM_MAX];
  float* scales = const_cast<float*>(scales_of(unit, dim));
  scales[offset] = to_int8(key, dim, [&](int64_t d, Ints bytes) { store_bytes(narrow + d, bytes); });
  for (int64_t d = 0; d < dim; d += 4) std::memcpy(unit + d * UNIT_TOKENS + offset * 4, narrow + d, 4);
  uint8_t* row = unit + dim * UNIT_TOKENS + offset / 4 * dim * 4 + offset % 4;
  scales[UNIT_TOKENS + offset] =
      to_int8(value, dim, [&](int64_t d, Ints bytes) { store_bytes_apart(row + d * 4, bytes); });
}

// What four bytes a lane less 128 are in bf16: pairs of the first two, and of the others.
static inline void widen_lanes(Ints bytes, Ints& first, Ints& second) {
  const Ints signs = bytes ^ ints(static_cast<int32_t>(0x80808080));
  const auto byte = [&](int number) { return to_floats(signs << (24 - 8 * number) >> 24); };
  first = exact_pairs(byte(0), byte(1));
  second = exact_pairs(byte(2), byte(3));
}

// A unit in int8 as one in bf16, exactly; scales are told apart, a key's NaN with its value's too.
static inline void widen(const uint8_t* unit, int64_t dim, bf16* to, float* key_scales, float* value_scales) {
  Ints first, second;
  for (int64_t d = 0; d < dim / 4; ++d) {
    widen_lanes(load_ints(unit + d * 64), first, second);
    store_ints(reinterpret_cast<int32_t*>(to + d * 64), first);
    store_ints(reinterpret_cast<int32_t*>(to + d * 64 + 32), second);
  }
  unit += dim * UNIT_TOKENS, to += dim * UNIT_TOKENS;
  for (int64_t quad = 0; quad < UNIT_TOKENS / 4; ++quad)
    for (int64_t d = 0; d < dim; d += 16) {
      widen_lanes(load_ints(unit + (quad * dim + d) * 4), first, second);
      store_ints(reinterpret_cast<int32_t*>(to + (2 * quad * dim + d) * 2), first);
      store_ints(reinterpret_cast<int32_t*>(to + ((2 * quad + 1) * dim + d) * 2), second);
    }
  const float* scales = reinterpret_cast<const float*>(unit + dim * UNIT_TOKENS);
  const Floats keys = load(scales), values = load(scales + UNIT_TOKENS);
  store(key_scales, keys);
  store(value_scales, values + (keys - keys));
}
