// Owns: the iterations that the page keeps, as one ring of typed arrays a field and one ring for
// what the lanes show in them, so that memory is bounded however long the page stays open.
// Called by: store.js (append, push), every track and figure (read). An iteration is known by its
// index, counted since the page opened. It must never keep a record or allocate once built.

const ITERATIONS = 1 << 14; // about five minutes at 50 a second
const OPS = 1 << 20; // twenty seconds of 256 lanes at 200 iterations a second, hours at a few

const WIDE = [
  'begin_at_ns',
  'end_at_ns',
  'plan_ns',
  'launch_ns',
  'commit_ns',
  'device_ns',
];
const NARROW = [
  'step',
  'running',
  'waiting',
  'token_budget',
  'prefill_tokens',
  'decode_tokens',
  'padding_tokens',
  'idle_rows',
  'bucket',
  'kv_blocks_used',
  'kv_blocks_cached',
  'lost_before',
];

export class Columns {
  // Sizes are powers of two; tests pass small ones.
  constructor(iterations = ITERATIONS, ops = OPS) {
    this.mask = iterations - 1;
    this.opMask = ops - 1;
    for (const name of WIDE) this[name] = new Float64Array(iterations);
    for (const name of NARROW) this[name] = new Int32Array(iterations);
    this.rows = new Int32Array(iterations); // sequences in the batch
    this.preempted = new Int32Array(iterations);
    this.stop = new Uint8Array(iterations); // index into STOPS
    this.blocker = new Int32Array(iterations); // request, or -1
    this.hole = new Uint8Array(iterations); // records were lost just before it
    this.opFrom = new Float64Array(iterations);
    this.opCount = new Int32Array(iterations);
    this.opLane = new Int16Array(ops);
    this.opKind = new Uint8Array(ops);
    this.opRequest = new Int32Array(ops);
    this.opAmount = new Int32Array(ops); // tokens, or the stop's index for a wait
    this.opPosition = new Int32Array(ops); // a slice's start position
    this.opBlocks = new Int32Array(ops); // blocks the slice's sequence holds
    this.clear();
  }

  clear() {
    this.count = 0; // iterations ever appended
    this.first = 0; // the oldest one still whole
    this.opHead = 0;
  }

  slot(index) {
    return index & this.mask;
  }
  get last() {
    return this.count - 1;
  }
  has(index) {
    return index >= this.first && index < this.count;
  }
  get newestNs() {
    return this.count > this.first ? this.end_at_ns[this.slot(this.last)] : 0;
  }

  append(iteration, stop, hole) {
    const s = this.slot(this.count);
    for (const name of WIDE) this[name][s] = iteration[name];
    for (const name of NARROW) this[name][s] = iteration[name];
    this.rows[s] = iteration.requests.length;
    this.preempted[s] = iteration.preempted.length;
    this.stop[s] = Math.max(0, stop);
    this.blocker[s] = iteration.admission_blocker ?? -1;
    this.hole[s] = hole ? 1 : 0;
    this.opFrom[s] = this.opHead;
    this.opCount[s] = 0;
    this.count++;
    this.first = Math.max(this.first, this.count - this.mask - 1);
    return this.count - 1;
  }

  // One thing that a lane shows in the newest iteration; lane -1 is beyond the last lane.
  push(lane, kind, request, amount = 0, position = 0, blocks = 0) {
    const at = this.opHead & this.opMask;
    this.opLane[at] = lane;
    this.opKind[at] = kind;
    this.opRequest[at] = request;
    this.opAmount[at] = amount;
    this.opPosition[at] = position;
    this.opBlocks[at] = blocks;
    this.opHead++;
    this.opCount[this.slot(this.count - 1)]++;
    const oldest = this.opHead - this.opMask - 1;
    while (this.first < this.count - 1 && this.opFrom[this.slot(this.first)] < oldest) this.first++;
  }

  // Where in the op arrays the k-th thing of an iteration stands.
  op(index, k) {
    return (this.opFrom[this.slot(index)] + k) & this.opMask;
  }
  ops(index) {
    return this.opCount[this.slot(index)];
  }

  // Index of the iteration whose tile holds the instant, or the nearest later one.
  find(ns) {
    let low = this.first,
      high = this.count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end_at_ns[this.slot(middle)] <= ns) low = middle + 1;
      else high = middle;
    }
    return Math.max(this.first, low);
  }

  tileNs(index) {
    const s = this.slot(index);
    return this.end_at_ns[s] - this.begin_at_ns[s];
  }
}
