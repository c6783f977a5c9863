// A whole step of a llama-type decoder in one parallel region (kernels/native_step.py calls it), and
// its parts alone: products and attention. Rows of any mix of prompt chunks and decodes. The model's
// shape and its packed weights are data that Python hands in; buffers grow to the largest step seen.
// Compiled once for each target of simd.h; kernels/native.py calls what this CPU can run.

#include <chrono>
#include <map>
#include <vector>

#include "choose.h"
#include "linear.h"
#include "pack.h"
#include "paged.h"
#include "pool.h"
#include "profile.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto BEAT = std::chrono::milliseconds(100);
constexpr int64_t FEW_ROWS = 4;  // so few that each thread norms them all: a barrier costs more
constexpr int64_t FED_ROWS = 64;  // of gate and up kept at a time
constexpr int64_t EXPECTED_BYTES = 8192;  // of weights, fetched before their time

struct Layer {
  const float *input_norm, *post_norm;
  const float *qkv_bias, *query_norm, *key_norm;  // null where a model has none
  Weight qkv, output, gate_up, down;
};

struct Model {
  Shape shape;
  int64_t hidden, fed, vocabulary;
  float epsilon;
  const bf16* embedding;   // [vocabulary][hidden]
  const float* rotations;  // [positions][dim / 2][2]: cosine, sine
  const float* final_norm;
  Weight head;
  std::vector<Layer> layers;
};

inline void norm_row(const float* x, const float* weight, int64_t width, float epsilon, float* out) {
  const Floats ratio = floats(norm_ratio(x, width, epsilon));
  for (int64_t k = 0; k < width; k += 16) store(out + k, load(x + k) * ratio * load(weight + k));
}

// One step at a time, on the threads of one pool.
class Engine {
 public:
  Profile profile;

  explicit Engine(int threads) : pool_(threads) {}

  int threads() const { return pool_.threads(); }

  void multiply(const Weight& w, const bf16* x, int64_t rows, float* y, int64_t stride) {
    const Rows in = a_.get(w.form_of(rows), rows, w.inputs);
    const Turn* turn = open_rows(w.inputs);
    pool_.run([&](int id) {
      pool_.share(id, rows, std::max<int64_t>(1, rows / 16), [&](int64_t from, int64_t to) {
        float* row = row_[id].get();
        for (int64_t m = from; m < to; ++m) {
          for (int64_t k = 0; k < w.inputs; k += 16) store(row + k, load_bf16(x + m * w.inputs + k));
          in.store_row(m, row, turn);
        }
      });
      pool_.barrier();
      tiles(id, w, in, rows, [&](int64_t m, int64_t n, Floats low, Floats high) {
        store(y + m * stride + n, low);
        store(y + m * stride + n + 16, high);
      });
    });
  }

  void attend(const Shape& shape, uint8_t* layer, const float* qkv, const Batch& batch, float* out) {
    attention_.open(batch, shape, threads());
    attention_.qkv = qkv, attention_.rotations = nullptr;
    pool_.run([&](int id) { attend_all(id, layer, {}, [](int64_t, int64_t, int64_t) {}); });
    std::memcpy(out, attention_.out(), batch.tokens * shape.query_width() * sizeof(float));
  }

  void best(const float* logits, int64_t rows, int64_t vocabulary, int64_t stride, float* values, int64_t* tokens) {
    each_row(rows, [&](int64_t m) {
      const Best found = best_of(logits + m * stride, vocabulary);
      values[m] = found.value, tokens[m] = found.token;
    });
  }

  void draw(float* logits, int64_t vocabulary, int64_t stride, const float* best, const int64_t* rows, int64_t count,
            const Draw* draws, int64_t* tokens) {
    each_row(count, [&](int64_t i) {
      const float most = best[rows[i]];
      tokens[i] = std::isfinite(most) ? drawn_from(logits + rows[i] * stride, vocabulary, most, draws[i]) : 0;
    });
  }

  void step(const Model& model, uint8_t* cache, int64_t layer_bytes, const Batch& batch, const int64_t* ids,
            const int64_t* positions, const int64_t* wanted, int64_t wanted_count, float* logits, void (*beat)()) {
    const int64_t tokens = batch.tokens;
    attention_.open(batch, model.shape, threads());
    attention_.rotations = model.rotations, attention_.positions = positions;
    x_.get(tokens * model.hidden), qkv_.get(tokens * model.shape.width());
    attention_.qkv = qkv_.get();
    // Nothing may grow while the threads run.
    own_.resize(threads());
    turn_ = open_rows(model.hidden);
    const int64_t most = std::max(tokens, wanted_count);
    for (const Form form : {BF16, INT8}) {  // TURNED takes no more than INT8
      for (auto& own : own_) own.get(form, FEW_ROWS, model.hidden);
      a_.get(form, tokens, model.hidden);
      b_.get(form, most, std::max(model.shape.query_width(), model.hidden));
      c_.get(form, tokens, model.fed);
    }
    profile.begin();
    if (tokens <= FEW_ROWS) embed(model, ids, 0, tokens);
    pool_.run([&](int id) {
      if (tokens > FEW_ROWS) {
        pool_.share(id, tokens, 1, [&](int64_t from, int64_t to) { embed(model, ids, from, to); });
        pool_.barrier();
      }
      profile.mark(id, EMBEDDING);
      auto last_beat = Clock::now();
      for (size_t i = 0; i < model.layers.size(); ++i) {
        const Weight& after = i + 1 < model.layers.size() ? model.layers[i + 1].qkv : model.head;
        run_layer(id, model, model.layers[i], after, cache + i * layer_bytes, tokens);
        if (id == 0 && Clock::now() - last_beat > BEAT) beat(), last_beat = Clock::now();
      }
      score(id, model, wanted, wanted_count, logits);
      profile.mark(id, HEAD);
    });
  }

  // Of other tokens of the step that ran last: what its layers made of them is still there.
  void logits_of(const Model& model, const int64_t* wanted, int64_t count, float* logits) {
    for (const Form form : {BF16, INT8}) b_.get(form, count, model.hidden);
    profile.begin();
    pool_.run([&](int id) {
      score(id, model, wanted, count, logits);
      profile.mark(id, HEAD);
    });
  }

 private:
  Pool pool_;
  Attention attention_;
  Input a_, b_, c_;
  std::vector<Input> own_;
  Buffer<float> x_, qkv_;
  std::vector<Buffer<float>> row_;  // a thread's own
  std::map<int64_t, Turn> turns_;   // by size: those of the models that it serves
  const Turn* turn_ = nullptr;      // of the step's model

  // Make room for a row of each thread; return what turns such rows, null where nothing can.
  const Turn* open_rows(int64_t width) {
    row_.resize(threads());
    for (auto& row : row_) row.get(width);
    return Turn::fits(width) ? &turns_.try_emplace(width, width).first->second : nullptr;
  }

  template <class Each> void each_row(int64_t rows, const Each& each) {
    profile.begin();
    if (rows == 1) {
      each(0);  // to call the others takes longer
    } else {
      pool_.run([&](int id) {
        pool_.share(id, rows, 1, [&](int64_t from, int64_t to) {
          for (int64_t m = from; m < to; ++m) each(m);
        });
      });
    }
    profile.mark(0, TOKENS);
  }

  // Every tile of a product's outputs; each(m, n, low, high) gets 32 of them from n on.
  template <class Each> void tiles(int id, const Weight& w, const Rows& in, int64_t rows, const Each& each) {
    pool_.share(id, w.tiles(), 1, [&](int64_t from, int64_t to) {
      for (int64_t tile = from; tile < to; ++tile)
        multiply_tile(w, in, tile, 0, rows,
                      [&](int64_t m, Floats low, Floats high) { each(m, tile * TILE, low, high); });
    });
  }

  void embed(const Model& model, const int64_t* ids, int64_t from, int64_t to) {
    for (int64_t m = from; m < to; ++m)
      for (int64_t k = 0; k < model.hidden; k += 16)
        store(x_.get() + m * model.hidden + k, load_bf16(model.embedding + ids[m] * model.hidden + k));
  }

  // Row m of the residual stream, normed, as row i of `to`.
  void put_normed(int id, const Model& model, const float* norm, int64_t m, const Rows& to, int64_t i) {
    float* row = row_[id].get();
    norm_row(x_.get() + m * model.hidden, norm, model.hidden, model.epsilon, row);
    to.store_row(i, row, turn_);
  }

  // The residual stream's rows, normed, in the form that `w` reads: shared, or each thread its own.
  Rows normed(int id, const Model& model, const float* norm, const Weight& w, int64_t tokens) {
    const auto row = [&](const Rows& to, int64_t m) { put_normed(id, model, norm, m, to, m); };
    if (tokens <= FEW_ROWS) {
      const Rows mine = own_[id].get(w.form_of(tokens), tokens, model.hidden);
      for (int64_t m = 0; m < tokens; ++m) row(mine, m);
      return mine;
    }
    const Rows all = a_.get(w.form_of(tokens), tokens, model.hidden);
    pool_.share(id, tokens, std::max<int64_t>(1, tokens / 16), [&](int64_t from, int64_t to) {
      for (int64_t m = from; m < to; ++m) row(all, m);
    });
    pool_.barrier();
    return all;
  }

  // Attend, and tell of every token's heads that are complete: done(m, first head of the group, head).
  template <class Done> void attend_all(int id, uint8_t* layer, const HeadNorms& norms, const Done& done) {
    const Work& work = attention_.work;
    const int64_t heads = attention_.shape.kv_heads, tokens = attention_.batch->tokens;
    if (!attention_.is_fused()) {
      pool_.share(id, tokens, std::max<int64_t>(1, tokens / 16), [&](int64_t from, int64_t to) {
        for (int64_t m = from; m < to; ++m)
          for (int64_t h = 0; h < heads; ++h) attention_.place(layer, norms, m, h);
      });
      pool_.barrier();
    }
    pool_.share(id, work.pieces.size(), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        if (!attention_.attend(layer, norms, i, id)) continue;
        const Piece& piece = work.pieces[i];
        done(work.starts[piece.row] + piece.first, piece.count, piece.head);
      }
    });
    pool_.barrier();
    if (!attention_.is_split()) return;
    pool_.share(id, attention_.batch->rows * heads, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        if (attention_.join(i / heads, i % heads)) done(i / heads, 1, i % heads);
    });
    pool_.barrier();
  }

  // All meet; meanwhile the weights come that this thread reads first afterwards, of a product whose
  // tiles are shared in so many ranges alike. Memory would idle until then.
  void meet_for(int id, const Weight& next, int64_t rows, int64_t ranges = 1) {
    const bool fours = next.reads_fours(rows);
    const char* from = static_cast<const char*>(fours ? next.fours : next.values);
    const int64_t bytes = fours ? next.inputs / BLOCK * FOUR_BYTES : next.tile_bytes(), count = next.tiles() / ranges;
    for (int64_t range = 0; range < ranges; ++range)
      for (int64_t at = 0; at < EXPECTED_BYTES; at += 64)
        fetch_near(from + (range * count + count * id / threads()) * bytes + at);
    pool_.barrier();
  }

  void add_product(int id, const Model& model, const Weight& w, const Rows& in, int64_t tokens) {
    tiles(id, w, in, tokens, [&](int64_t m, int64_t n, Floats low, Floats high) {
      float* to = x_.get() + m * model.hidden + n;
      store(to, load(to) + low);
      store(to + 16, load(to + 16) + high);
    });
  }

  void run_layer(int id, const Model& model, const Layer& layer, const Weight& after, uint8_t* cache, int64_t tokens) {
    const Shape& shape = model.shape;
    const Rows in = normed(id, model, layer.input_norm, layer.qkv, tokens);
    profile.mark(id, NORMS);
    tiles(id, layer.qkv, in, tokens, [&](int64_t m, int64_t n, Floats low, Floats high) {
      float* to = qkv_.get() + m * shape.width() + n;
      const float* bias = layer.qkv_bias;
      store(to, bias ? low + load(bias + n) : low);
      store(to + 16, bias ? high + load(bias + n + 16) : high);
    });
    meet_for(id, layer.output, tokens);
    profile.mark(id, LINEAR);
    const Rows attended = b_.get(layer.output.form_of(tokens), tokens, shape.query_width());
    const HeadNorms norms{layer.query_norm, layer.key_norm, model.epsilon};
    attend_all(id, cache, norms, [&](int64_t m, int64_t count, int64_t head) {
      const int64_t width = shape.group() * shape.dim;
      for (int64_t t = m; t < m + count; ++t) {
        const float* heads = attention_.out() + t * shape.query_width() + head * width;
        for (int64_t k = 0; k < width; k += 32)
          attended.store(t, head * width + k, load(heads + k), load(heads + k + 16));
      }
    });
    profile.mark(id, ATTENTION);
    add_product(id, model, layer.output, attended, tokens);
    meet_for(id, layer.gate_up, tokens, 2);
    profile.mark(id, LINEAR);
    const Rows again = normed(id, model, layer.post_norm, layer.gate_up, tokens);
    profile.mark(id, NORMS);
    const Rows fed = c_.get(layer.down.form_of(tokens), tokens, model.fed);
    feed(id, layer.gate_up, again, fed, tokens);
    meet_for(id, layer.down, tokens);
    add_product(id, model, layer.down, fed, tokens);
    meet_for(id, after, tokens);
    profile.mark(id, LINEAR);
  }

  // silu(gate) x up, 32 of each at a time, in the form that the next product reads.
  void feed(int id, const Weight& w, const Rows& in, const Rows& out, int64_t tokens) {
    pool_.share(id, out.inputs / TILE, 1, [&](int64_t from, int64_t to) {
      alignas(64) float gates[FED_ROWS][TILE];
      for (int64_t tile = from; tile < to; ++tile)
        for (int64_t first = 0; first < tokens; first += FED_ROWS) {
          const int64_t last = std::min(tokens, first + FED_ROWS);
          multiply_tile(w, in, tile, first, last, [&](int64_t m, Floats low, Floats high) {
            store(gates[m - first], silu_of(low));
            store(gates[m - first] + 16, silu_of(high));
          });
          multiply_tile(w, in, out.inputs / TILE + tile, first, last, [&](int64_t m, Floats low, Floats high) {
            const float* gate = gates[m - first];
            out.store(m, tile * TILE, load(gate) * low, load(gate + 16) * high);
          });
        }
    });
  }

  // Only rows that are wanted go through the head; logits are [count][outputs of the head].
  void score(int id, const Model& model, const int64_t* wanted, int64_t count, float* logits) {
    const Rows in = b_.get(model.head.form_of(count), count, model.hidden);
    pool_.share(id, count, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) put_normed(id, model, model.final_norm, wanted[i], in, i);
    });
    pool_.barrier();
    tiles(id, model.head, in, count, [&](int64_t m, int64_t n, Floats low, Floats high) {
      store(logits + m * model.head.outputs + n, low);
      store(logits + m * model.head.outputs + n + 16, high);
    });
  }
};

}  // namespace

extern "C" {

Engine* engine_new(int32_t threads) { return new Engine(std::clamp(threads, 1, Pool::THREADS_MAX)); }

void engine_free(Engine* engine) { delete engine; }

// y[rows][stride] = x[rows][inputs] times the weight's transpose.
void engine_multiply(Engine* engine, const Weight* w, const bf16* x, int64_t rows, float* y, int64_t stride) {
  engine->multiply(*w, x, rows, y, stride);
}

// Heads that are turned already, qkv [tokens][shape.width()]; out [tokens][heads x dim].
void engine_attend(Engine* engine, const Shape* shape, uint8_t* layer, const float* qkv, const Batch* batch, float* out) {
  engine->attend(*shape, layer, qkv, *batch, out);
}

// The largest of each row of logits [rows][stride], NaN if one is none, and its token.
void engine_best(Engine* engine, const float* logits, int64_t rows, int64_t vocabulary, int64_t stride, float* values,
                 int64_t* tokens) {
  engine->best(logits, rows, vocabulary, stride, values, tokens);
}

// A token for each of these rows; those whose best is not finite get 0. logits are overwritten.
void engine_draw(Engine* engine, float* logits, int64_t vocabulary, int64_t stride, const float* best,
                 const int64_t* rows, int64_t count, const Draw* draws, int64_t* tokens) {
  engine->draw(logits, vocabulary, stride, best, rows, count, draws, tokens);
}

// beat is called in a step of more than a tenth of a second, which is no hang as long as it goes on.
void engine_step(Engine* engine, const Model* model, uint8_t* cache, int64_t layer_bytes, const Batch* batch,
                 const int64_t* ids, const int64_t* positions, const int64_t* wanted, int64_t wanted_count,
                 float* logits, void (*beat)()) {
  engine->step(*model, cache, layer_bytes, *batch, ids, positions, wanted, wanted_count, logits, beat);
}

// Logits [wanted_count] of other tokens of the step that ran last, which was of this model.
void engine_logits(Engine* engine, const Model* model, const int64_t* wanted, int64_t wanted_count, float* logits) {
  engine->logits_of(*model, wanted, wanted_count, logits);
}

// Where steps' time went since the last call, ns by profile.h's parts; from now on it is told or not.
void engine_profile(Engine* engine, int32_t on, int64_t* spent_ns) {
  std::copy(engine->profile.spent_ns, engine->profile.spent_ns + SECTIONS, spent_ns);
  engine->profile = Profile();
  engine->profile.on = on;
}

// sizes: hidden, fed, vocabulary. Nothing is copied: what is pointed to must outlive the model.
Model* model_new(const Shape* shape, const int64_t* sizes, float epsilon, const bf16* embedding,
                 const float* rotations, const float* final_norm, const Weight* head) {
  return new Model{*shape, sizes[0], sizes[1], sizes[2], epsilon, embedding, rotations, final_norm, *head, {}};
}

// more: a bias of queries, keys and values, norms of query and key heads; null what is not there.
void model_add_layer(Model* model, const float* input_norm, const float* post_norm, const float* const* more,
                     const Weight* weights) {
  model->layers.push_back(
      {input_norm, post_norm, more[0], more[1], more[2], weights[0], weights[1], weights[2], weights[3]});
}

void model_free(Model* model) { delete model; }

}  // extern "C"
