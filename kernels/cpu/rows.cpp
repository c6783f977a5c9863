// The counters of a batch's sequences, one pass a row: what engine/rows.py does in numpy, whose
// NumpyRows is the specification. Called by NativeRows through ctypes; plain C ABI, int64 and bytes.
// A row of `values` is one sequence's counters side by side, in the order of engine/table.py.
// Never allocates and never touches a slot that it was not given.

#include <algorithm>
#include <cstdint>

namespace {

enum Column { EPOCH, KNOWN, READ, PLANNED, COMPUTED, HIGHEST, LIMIT, PROMPT,
              ROOM, NAMEABLE, LAST, DECIDED, FLIGHTS, ITERATIONS, IDS, COLUMNS };

constexpr int64_t PLACEHOLDER = -1;

// Rows of the matrix that reserve fills.
enum Reserved { STARTS, COUNTS, EPOCHS, OUTPUT_INDICES, LAST_IDS, BLOCKS };

}  // namespace

extern "C" {

// pending[n]; decodes and lacking hold found[0] and found[1] places; found[2] rows are chunks.
void rows_outlook(const int64_t* values, const int64_t* slots, int64_t n, int64_t* pending,
                  int64_t* decodes, int64_t* lacking, int64_t* found) {
  int64_t decodes_n = 0, lacking_n = 0, chunks = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t* row = values + slots[i] * COLUMNS;
    const int64_t wants = std::min(row[KNOWN], row[LIMIT]) - row[PLANNED];
    pending[i] = wants;
    if (wants == 1) {
      decodes[decodes_n++] = i;
      if (row[PLANNED] >= row[ROOM]) lacking[lacking_n++] = i;
    }
    chunks += wants > 1;
  }
  found[0] = decodes_n, found[1] = lacking_n, found[2] = chunks;
}

// out is 6 x n, samples n bytes; counts may be null: one token each. found: decode tokens, samples.
void rows_reserve(int64_t* values, const int64_t* slots, const int64_t* counts, int64_t n,
                  int64_t block_tokens, int64_t* out, uint8_t* samples, int64_t* found) {
  int64_t decode_tokens = 0, sampled = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t* row = values + slots[i] * COLUMNS;
    const int64_t count = counts ? counts[i] : 1, start = row[PLANNED], end = start + count;
    const bool reaches = end == row[KNOWN];
    const int64_t decode_from = std::max(row[HIGHEST], row[PROMPT]);
    decode_tokens += std::max<int64_t>(0, std::min(end - decode_from, count));
    if (end > row[ROOM]) row[ROOM] += block_tokens;  // it was lacking, and has been given one
    out[STARTS * n + i] = start;
    out[COUNTS * n + i] = count;
    out[EPOCHS * n + i] = row[EPOCH];
    out[OUTPUT_INDICES * n + i] = row[KNOWN] - row[PROMPT];
    out[LAST_IDS * n + i] = row[LAST];
    out[BLOCKS * n + i] = row[ROOM] / block_tokens;
    samples[i] = reaches;
    sampled += reaches;
    row[PLANNED] = end;
    row[KNOWN] += reaches;
    if (reaches) row[LAST] = PLACEHOLDER;
    row[FLIGHTS] += 1;
    row[ITERATIONS] += 1;
  }
  found[0] = decode_tokens, found[1] = sampled;
}

// reserved is the matrix that rows_reserve filled; tokens are those of the rows that sample, packed.
// What is kept of them goes behind the ids that each row has; there is room up to its limit.
// full and due hold found[0] and found[1] places; found[2] tokens were kept, found[3] computed.
void rows_land(int64_t* values, const int64_t* slots, const int64_t* reserved,
               const uint8_t* samples, int64_t n, const int64_t* tokens, const int64_t* stops,
               int64_t stops_n, uint8_t* kept, int64_t* full, int64_t* due, int64_t* found) {
  int64_t full_n = 0, due_n = 0, kept_n = 0, computed_sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t* row = values + slots[i] * COLUMNS;
    row[FLIGHTS] -= 1;
    if (row[EPOCH] == reserved[EPOCHS * n + i] && row[PLANNED] > row[COMPUTED]) {
      const int64_t count = reserved[COUNTS * n + i];
      row[COMPUTED] += count;
      computed_sum += count;
    }
    row[HIGHEST] = std::max(row[HIGHEST], row[COMPUTED]);
    if (row[COMPUTED] >= row[NAMEABLE]) full[full_n++] = i;
    const bool keeps = samples[i] && !row[DECIDED];
    bool is_due = row[DECIDED];
    if (keeps) {
      const int64_t token = *tokens;
      reinterpret_cast<int32_t*>(row[IDS])[row[READ]] = static_cast<int32_t>(token);
      const int64_t read = ++row[READ];
      row[LAST] = read == row[KNOWN] ? token : PLACEHOLDER;
      is_due = read > row[LIMIT] || read == row[PROMPT] + 1 ||
               std::find(stops, stops + stops_n, token) != stops + stops_n;
    }
    tokens += samples[i];
    kept[i] = keeps;
    kept_n += keeps;
    if (is_due) due[due_n++] = i;
  }
  found[0] = full_n, found[1] = due_n, found[2] = kept_n, found[3] = computed_sum;
}

}  // extern "C"
