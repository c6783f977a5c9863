// Weights from rows of numbers to the tiles that products read (linear.h), once, at load.
#pragma once
#include <memory>
#include <vector>

#include "linear.h"

extern "C" {

// w [outputs][inputs], to tiles of 32 outputs; rows past the last are zero.
void pack_bf16(const bf16* w, int64_t outputs, int64_t inputs, bf16* packed) {
  const int64_t tiles = (outputs + TILE - 1) / TILE;
  std::memset(packed, 0, tiles * TILE * inputs * sizeof(bf16));
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k)
      packed[n / TILE * TILE * inputs + (k / 2) * 2 * TILE + n % TILE * 2 + k % 2] = w[n * inputs + k];
}

// Whether rows of so many inputs can be turned.
int32_t can_turn(int64_t inputs) { return Turn::fits(inputs); }

// The same from float32 to int8 with a scale for each output, of rows that are turned or not.
void pack_int8(const float* w, int64_t outputs, int64_t inputs, int32_t turned, uint8_t* packed, float* scales) {
  const int64_t padded = (outputs + TILE - 1) / TILE * TILE;
  const auto turn = turned ? std::make_unique<Turn>(inputs) : nullptr;
  std::vector<float> row(inputs);
  std::memset(packed, 128, padded * inputs);
  std::fill(scales, scales + padded, 0.f);
  for (int64_t n = 0; n < outputs; ++n) {
    std::copy(w + n * inputs, w + (n + 1) * inputs, row.begin());
    if (turn) turn->apply(row.data());
    float most = 0;
    for (const float value : row) most = std::max(most, std::fabs(value));
    scales[n] = most / 127.f;
    const float ratio = most > 0 ? 127.f / most : 0.f;
    for (int64_t k = 0; k < inputs; ++k)
      packed[n / TILE * TILE * inputs + (k / 4) * 4 * TILE + n % TILE * 4 + k % 4] =
          static_cast<uint8_t>(static_cast<int>(std::lrint(row[k] * ratio)) + 128);
  }
}

// The same to 4 bits (four.h) if that changes nothing; 0 if it would.
int32_t pack_int4(const float* w, int64_t outputs, int64_t inputs, uint8_t* packed) {
  const int64_t tiles = (outputs + TILE - 1) / TILE, blocks = inputs / BLOCK;
  std::memset(packed, 0, tiles * blocks * FOUR_BYTES);
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t block = 0; block < blocks; ++block) {
      uint8_t* to = packed + (n / TILE * blocks + block) * FOUR_BYTES;
      if (!put_four(w + n * inputs + block * BLOCK, n % TILE, to)) return 0;
    }
  return 1;
}

}  // extern "C"
