// Attention of a whole step over the paged cache: places what is new, then attends piece by piece.
// The engine (step.cpp) shares the pieces among its threads, with a barrier where this says so.
#pragma once
#include "batch.h"
#include "buffer.h"

constexpr float LOG2_E = 1.44269504f;

// Turn a head's adjacent pairs, and multiply by `times`.
inline void rotate(const float* x, const float* turns, int64_t dim, float times, float* out) {
  const Floats factor = floats(times);
  for (int64_t d = 0; d < dim; d += 16) store(out + d, multiply_complex(load(x + d), load(turns + d)) * factor);
}

// One over the root of the mean square, with which a norm multiplies.
inline float norm_ratio(const float* x, int64_t width, float epsilon) {
  Floats squares = floats(0);
  for (int64_t k = 0; k < width; k += 16) {
    const Floats value = load(x + k);
    squares = fma(value, value, squares);
  }
  return 1.f / sqrtf(sum(squares) / width + epsilon);
}

// Norms over each head before it is turned, null where a model has none (Qwen 3 has them).
struct HeadNorms {
  const float *query = nullptr, *key = nullptr;  // [dim]
  float epsilon = 0;
};

// Attention's part of an engine: where queries, keys and values come from, and the pieces of a step.
class Attention {
 public:
  Shape shape;
  Work work;
  const Batch* batch = nullptr;
  const float* qkv = nullptr;       // [tokens][shape.width()]
  const float* rotations = nullptr;  // none: heads are turned already
  const int64_t* positions = nullptr;

  void open(const Batch& step, const Shape& heads, int threads) {
    shape = heads, batch = &step;
    work.plan(step, heads, threads);
    queries_.get(step.tokens * heads.query_width());
    out_.get(step.tokens * heads.query_width());
    partials_.get(step.rows * heads.kv_heads * passes() * work.parts_max);
    tiles_.get(threads);
  }

  float* out() const { return out_.get(); }

  // Whether a piece may place its own token: nobody else reads what it writes.
  bool is_fused() const { return work.decodes_only && work.parts_max == 1; }

  // Turn the query heads of token m that read key head h, and put its key and value into the cache.
  void place(uint8_t* layer, const HeadNorms& norms, int64_t m, int64_t h) {
    const int64_t dim = shape.dim, group = shape.group(), row = work.row_of[m];
    const int64_t position = batch->context_lengths[row] - batch->query_lengths[row] + m - work.starts[row];
    const float* token = qkv + m * shape.width();
    const float* turns = rotations ? rotations + positions[m] * dim : nullptr;
    alignas(64) float turned[HEAD_DIM_MAX];
    const auto turn = [&](const float* x, const float* norm, float times) {
      alignas(64) float normed[HEAD_DIM_MAX];
      if (norm) {
        const Floats ratio = floats(norm_ratio(x, dim, norms.epsilon));
        for (int64_t d = 0; d < dim; d += 16)
          store(normed + d, load(x + d) * ratio * load(norm + d));
        x = normed;
      }
      if (turns) return rotate(x, turns, dim, times, turned);
      for (int64_t d = 0; d < dim; d += 16)
        store(turned + d, load(x + d) * floats(times));
    };
    bf16* queries = queries_.get() + m * shape.query_width();
    for (int64_t head = h * group; head < (h + 1) * group; ++head) {
      turn(token + head * dim, norms.query, LOG2_E / sqrtf(static_cast<float>(dim)));
      for (int64_t d = 0; d < dim; d += 16) store_bf16(queries + head * dim + d, load(turned + d));
    }
    turn(token + (shape.heads + h) * dim, norms.key, 1.f);
    const Sequence s = work.sequence(layer, shape, row, h);
    uint8_t* unit = const_cast<uint8_t*>(s.unit(position / UNIT_TOKENS));
    const auto store_kv = batch->int8 ? store_int8_kv : store_bf16_kv;
    store_kv(unit, position % UNIT_TOKENS, dim, turned, token + (shape.heads + shape.kv_heads + h) * dim);
  }

  // Whether some contexts are split, so that `join` must follow.
  bool is_split() const { return work.parts_max > 1; }

  // Attend one piece. What is not split stands in out() then; true says so.
  bool attend(uint8_t* layer, const HeadNorms& norms, int64_t index, int id) {
    const Piece& piece = work.pieces[index];
    const int64_t m = work.starts[piece.row] + piece.first, group = shape.group();
    const Sequence s = work.sequence(layer, shape, piece.row, piece.head);
    const int64_t at = m * shape.query_width() + piece.head * group * shape.dim;
    if (batch->query_lengths[piece.row] > 1) {
      const int64_t position = batch->context_lengths[piece.row] - batch->query_lengths[piece.row] + piece.first;
      const auto attend_all = batch->int8 ? attend_tokens<true> : attend_tokens<false>;
      attend_all(tiles_.get()[id], queries_.get() + at, out() + at, shape.query_width(), group, piece.count, s,
                 position);
      return true;
    }
    if (is_fused()) place(layer, norms, m, piece.head);
    for (int64_t g = 0; g < group; g += GROUP_MAX) {
      const int64_t some = std::min<int64_t>(GROUP_MAX, group - g), from = at + g * shape.dim;
      if (some == 1) token_heads<1>(piece, index, s, layer, from, g / GROUP_MAX);
      if (some == 2) token_heads<2>(piece, index, s, layer, from, g / GROUP_MAX);
      if (some == 3) token_heads<3>(piece, index, s, layer, from, g / GROUP_MAX);
      if (some == 4) token_heads<4>(piece, index, s, layer, from, g / GROUP_MAX);
    }
    return piece.parts == 1;
  }

  // Join the parts of one row and key head, if it was split.
  bool join(int64_t row, int64_t head) {
    if (batch->context_lengths[row] < SPLIT_TOKENS) return false;
    float* to = out() + row * shape.query_width() + head * shape.group() * shape.dim;
    for (int64_t g = 0; g < shape.group(); g += GROUP_MAX) {
      const Partial* parts = partials(row, head, g / GROUP_MAX);
      const int64_t some = std::min<int64_t>(GROUP_MAX, shape.group() - g);
      if (some == 1) merge<1>(parts, work.parts_max, shape.dim, to + g * shape.dim);
      if (some == 2) merge<2>(parts, work.parts_max, shape.dim, to + g * shape.dim);
      if (some == 3) merge<3>(parts, work.parts_max, shape.dim, to + g * shape.dim);
      if (some == 4) merge<4>(parts, work.parts_max, shape.dim, to + g * shape.dim);
    }
    return true;
  }

 private:
  Buffer<bf16> queries_;
  Buffer<float> out_;
  Buffer<Partial> partials_;
  Buffer<Tile> tiles_;

  int64_t passes() const { return (shape.group() + GROUP_MAX - 1) / GROUP_MAX; }

  Partial* partials(int64_t row, int64_t head, int64_t pass) {
    return partials_.get() + ((row * shape.kv_heads + head) * passes() + pass) * work.parts_max;
  }

  template <int G>
  void token_heads(const Piece& piece, int64_t index, const Sequence& s, const uint8_t* layer, int64_t from,
                   int64_t pass) {
    const int64_t context = batch->context_lengths[piece.row], units = (context - 1) / UNIT_TOKENS + 1;
    const int64_t first = units * piece.part / piece.parts, last = units * (piece.part + 1) / piece.parts;
    const Piece& after = work.pieces[std::min<int64_t>(index + 1, work.pieces.size() - 1)];
    const Sequence next = work.sequence(layer, shape, after.row, after.head);
    const int64_t next_units = (batch->context_lengths[after.row] - 1) / UNIT_TOKENS + 1;
    const int64_t next_first = next_units * after.part / after.parts;
    Partial one;
    Partial& result = piece.parts > 1 ? partials(piece.row, piece.head, pass)[piece.part] : one;
    const auto attend_one = batch->int8 ? attend_token_int8<G> : attend_token<G>;
    attend_one(queries_.get() + from, s, context, first, last, next, next_first, next_units - next_first, result);
    if (piece.parts == 1) merge<G>(&one, 1, shape.dim, out() + from);
  }
};
