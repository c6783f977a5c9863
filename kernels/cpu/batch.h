// A step's rows as attention sees them, and the pieces of work that its threads share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention8.h"

struct Shape {
  int64_t heads, kv_heads, dim;

  int64_t group() const { return heads / kv_heads; }
  int64_t query_width() const { return heads * dim; }
  int64_t width() const { return (heads + 2 * kv_heads) * dim; }  // of query, key and value
};

constexpr int64_t SPLIT_TOKENS = 64;  // contexts below are not worth splitting

// As ctypes sees it (kernels/native_step.py has the same fields).
struct Batch {
  int64_t tokens, rows;
  const int32_t* query_lengths;    // [rows]
  const int32_t* context_lengths;  // [rows]
  const int32_t* block_tables;     // [rows][blocks_width]
  int64_t blocks_width, block_tokens;
  int64_t int8;  // whether keys and values are kept in it, not in bf16
};

// One piece: query tokens first .. first + count - 1 of a row, for one key head; a single token of a
// long context is split in `parts` by units.
struct Piece {
  int64_t row, head, first, count, part, parts;
};

class Work {
 public:
  std::vector<Piece> pieces;
  std::vector<int64_t> starts, row_of;  // first token of each row; row of each token
  bool decodes_only = true;
  int64_t parts_max = 1;

  void plan(const Batch& batch, const Shape& shape, int threads) {
    starts.assign(1, 0), row_of.clear(), pieces.clear(), decodes_only = true, parts_max = 1;
    for (int64_t row = 0; row < batch.rows; ++row) {
      starts.push_back(starts.back() + batch.query_lengths[row]);
      row_of.resize(starts.back(), row);
      decodes_only &= batch.query_lengths[row] == 1;
    }
    expand(batch);
    unit_bytes_ = unit_bytes(shape.dim, batch.int8);
    const bool few = batch.rows * shape.kv_heads < 6 * threads;
    if (threads > 1 && few && decodes_only) parts_max = std::min(2 * threads, 32);
    std::vector<std::pair<int64_t, Piece>> costs;
    for (int64_t row = 0; row < batch.rows; ++row)
      for (int64_t head = 0; head < shape.kv_heads; ++head) add(batch, shape, row, head, costs);
    std::stable_sort(costs.begin(), costs.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (auto& cost : costs) pieces.push_back(cost.second);
  }

  Sequence sequence(const uint8_t* layer, const Shape& shape, int64_t row, int64_t head) const {
    return {layer + head * unit_bytes_, units_ + row * width_, shape.kv_heads * unit_bytes_, shape.dim};
  }

 private:
  std::vector<int32_t> expanded_;
  const int32_t* units_ = nullptr;
  int64_t width_ = 0, unit_bytes_ = 0;

  // Blocks of more than 16 tokens are several units in a row.
  void expand(const Batch& batch) {
    const int64_t each = batch.block_tokens / UNIT_TOKENS;
    units_ = batch.block_tables, width_ = batch.blocks_width * each;
    if (each == 1) return;
    expanded_.resize(batch.rows * width_);
    for (int64_t i = 0; i < batch.rows * batch.blocks_width; ++i)
      for (int64_t j = 0; j < each; ++j) expanded_[i * each + j] = batch.block_tables[i] * each + j;
    units_ = expanded_.data();
  }

  void add(const Batch& batch, const Shape& shape, int64_t row, int64_t head,
           std::vector<std::pair<int64_t, Piece>>& costs) const {
    const int64_t count = batch.query_lengths[row], context = batch.context_lengths[row];
    if (count == 1) {
      const int64_t parts = context >= SPLIT_TOKENS ? parts_max : 1;
      for (int64_t part = 0; part < parts; ++part)
        costs.push_back({context / parts, {row, head, 0, 1, part, parts}});
      return;
    }
    const int64_t most = Tile::tokens(shape.group());
    for (int64_t first = 0; first < count; first += most) {
      const int64_t some = std::min(most, count - first);
      costs.push_back({(context - count + first + some) * some, {row, head, first, some, 0, 1}});
    }
  }
};
