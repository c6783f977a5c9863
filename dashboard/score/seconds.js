// Owns: the last minutes a second at a time: sums, peaks, and one histogram a second of first
// token times and of token gaps. Called by: store.js (write), numbers.js and overview.js (read).
// Fixed memory; a second without records reads as empty, never as the one before it.
// Quantiles are read from buckets 3.3 % wide, so they are within 2 % of the exact ones.

const SECONDS = 512;
const BUCKETS = 512;
const LEAST_MS = 0.05;
const RATIO = Math.log(1.033);

const SUMS = [
  'prefill',
  'decode',
  'steps',
  'ended',
  'cancelled',
  'errors',
  'judged', // ended with an SLO of their own
  'good', // of those, met it
  'preempted',
];
const PEAKS = ['waiting', 'kv'];

const bucketOf = (ms) =>
  Math.min(BUCKETS - 1, Math.max(0, Math.floor(Math.log(ms / LEAST_MS) / RATIO)));
const valueOf = (bucket) => LEAST_MS * Math.exp((bucket + 0.5) * RATIO);

export class Seconds {
  constructor() {
    this.at = new Float64Array(SECONDS).fill(-1);
    for (const name of [...SUMS, ...PEAKS]) this[name] = new Int32Array(SECONDS);
    this.firstToken = new Uint32Array(SECONDS * BUCKETS);
    this.gap = new Uint32Array(SECONDS * BUCKETS);
    this.merged = new Float64Array(BUCKETS);
  }

  clear() {
    this.at.fill(-1);
  }

  // The slot of the second that holds an instant, emptied when it is a new one.
  slot(ns) {
    const second = Math.floor(ns / 1e9),
      s = second % SECONDS;
    if (this.at[s] === second) return s;
    this.at[s] = second;
    for (const name of [...SUMS, ...PEAKS]) this[name][s] = 0;
    this.firstToken.fill(0, s * BUCKETS, (s + 1) * BUCKETS);
    this.gap.fill(0, s * BUCKETS, (s + 1) * BUCKETS);
    return s;
  }

  // The slot of a second, or -1 when nothing was recorded in it.
  of(second) {
    const s = ((second % SECONDS) + SECONDS) % SECONDS;
    return this.at[s] === second ? s : -1;
  }

  iteration(record) {
    const s = this.slot(record.end_at_ns);
    this.prefill[s] += record.prefill_tokens;
    this.decode[s] += record.decode_tokens;
    this.steps[s]++;
    this.preempted[s] += record.preempted.length;
    this.waiting[s] = Math.max(this.waiting[s], record.waiting);
    this.kv[s] = Math.max(this.kv[s], record.kv_blocks_used);
    return s;
  }

  addFirstToken(s, ns) {
    this.firstToken[s * BUCKETS + bucketOf(ns / 1e6)]++;
  }
  addGap(s, ns) {
    this.gap[s * BUCKETS + bucketOf(ns / 1e6)]++;
  }

  sum(name, from, to) {
    let total = 0;
    for (let second = from; second < to; second++) {
      const s = this.of(second);
      if (s >= 0) total += this[name][s];
    }
    return total;
  }

  // Milliseconds below which a share q of the values in [from, to) lies, or null without values.
  quantile(name, q, from, to) {
    const merged = this.merged.fill(0);
    let n = 0;
    for (let second = from; second < to; second++) {
      const s = this.of(second);
      if (s < 0) continue;
      for (let b = 0; b < BUCKETS; b++) {
        const c = this[name][s * BUCKETS + b];
        if (c) {
          merged[b] += c;
          n += c;
        }
      }
    }
    if (!n) return null;
    let rank = Math.ceil(q * n);
    for (let b = 0; b < BUCKETS; b++) {
      rank -= merged[b];
      if (rank <= 0) return valueOf(b);
    }
    return valueOf(BUCKETS - 1);
  }
}
