// Rows of input in the form that a product reads, and the memory for them. Forms:
//   BF16    as they are.
//   INT8    in int8 with a scale for 32 inputs.
//   TURNED  turned (turn.h), then in int8 with a scale a row: only whole rows can be stored.
// One value that is no number makes its block or row none: a maximum would hide it.
#pragma once
#include <algorithm>

#include "buffer.h"
#include "four.h"
#include "simd.h"
#include "turn.h"

enum Form { BF16 = 0, INT8 = 1, TURNED = 2 };

constexpr int FOUR_BITS_ROWS = 3;  // up to which a weight's 4 bits are read

struct Rows {
  Form form;
  bool few;  // whether there are few enough for 4 bits
  int64_t inputs;
  bf16* values;      // BF16: [M][K]
  int8_t* quants;    // others: [M][K]
  float* scales;     // INT8: [M][K / 32], TURNED: [M]
  int32_t* offsets;  // the same: -128 x the sum of the quants that have a scale in common

  // Store 32 values of row m from input k on, not if TURNED.
  void store(int64_t m, int64_t k, Floats low, Floats high) const {
    if (form == BF16) {
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
    scales[at] = any(either(not_finite(low), not_finite(high))) ? NAN : most / 127.f;
    offsets[at] = -128 * sum(a + b);
  }

  // Store row m; `row` is overwritten if TURNED.
  void store_row(int64_t m, float* row, const Turn* turn) const {
    if (form == TURNED) {
      turn->apply(row);
      store_turned(m, row);
    } else {
      for (int64_t k = 0; k < inputs; k += 32) store(m, k, load(row + k), load(row + k + 16));
    }
  }

 private:
  void store_turned(int64_t m, const float* row) const {
    Floats most = floats(0);
    Lanes odd = first_lanes(0);
    for (int64_t k = 0; k < inputs; k += 16) {
      most = max(most, abs(load(row + k)));
      odd = either(odd, not_finite(load(row + k)));
    }
    const float scale = largest(most) / 127.f;
    const Floats ratio = floats(scale > 0 ? 1 / scale : 0.f);
    Ints total = ints(0);
    for (int64_t k = 0; k < inputs; k += 16) {
      const Ints some = round_to_ints(load(row + k) * ratio);
      store_bytes(quants + m * inputs + k, some);
      total = total + some;
    }
    scales[m] = any(odd) ? NAN : scale;
    offsets[m] = -128 * sum(total);
  }
};

class Input {  // memory for rows
 public:
  Rows get(Form form, int64_t rows, int64_t inputs) {
    Rows x{form, rows <= FOUR_BITS_ROWS, inputs, nullptr, nullptr, nullptr, nullptr};
    if (form == BF16) {
      x.values = values_.get(rows * inputs);
    } else {
      x.quants = quants_.get(rows * inputs);
      x.scales = scales_.get(rows * inputs / BLOCK);
      x.offsets = offsets_.get(rows * inputs / BLOCK);
    }
    return x;
  }

 private:
  Buffer<bf16> values_;
  Buffer<int8_t> quants_;
  Buffer<float> scales_;
  Buffer<int32_t> offsets_;
};
