// Owns: everything the page derives from records, each part with a stated bound. Called by:
// source.js through one writer, `ingest(kind, record, runId)`, and read by every view.
// Records are folded into columns and dropped. It must never know pixels, colours or the DOM,
// and never guess: what was lost leaves a hole, what was not seen stays unknown.

import { Columns } from './columns.js';
import { KIND, STOPS } from './kinds.js';
import { LaneSlots } from './laneslots.js';
import {
  addSpan,
  endWait,
  meanGapMs,
  newRequest,
  objectives,
  recall,
  setStart,
  startWait,
} from './request.js';
import { Seconds } from './seconds.js';

export const LANES_MAX = 272; // a batch of 256, and room for those who wait first
const ENDED_MAX = 2048;
const ARRIVAL_NEAR_NS = 60e9; // one known from a snapshot alone may have come long before

export class Store {
  constructor({ columns = new Columns(), lanes = LANES_MAX, endedMax = ENDED_MAX } = {}) {
    this.columns = columns;
    this.seconds = new Seconds();
    this.lanes = new LaneSlots(lanes);
    this.endedMax = endedMax;
    this.runId = null;
    this.restarts = 0;
    this.clear();
  }

  clear() {
    this.columns.clear();
    this.seconds.clear();
    this.lanes.clear();
    this.run = null;
    this.engines = 0; // engines that became ready, and how many had at the newest iteration
    this.enginesThen = 0;
    this.requests = new Map(); // integer -> request, live and ended
    this.integers = new Map(); // request_id -> integer, of those
    this.live = new Set();
    this.stop_ns = new Float64Array(STOPS.length); // time by admission stop
    this.ended = [];
    this.slo = null;
    this.openedSecond = null; // the first second this page has records of
    this.lostHere = 0; // records that this page missed; the history has them
    this.lostAsleep = 0; // of those, while nobody looked and the page had let go of its stream
    this.asleep = false;
    this.lostAtSource = 0; // iterations that the engine dropped; nobody has them
    this.lostUnknown = false;
    this.holeNext = false;
    this.fault = null;
    this.rejections = 0;
    this.records = 0;
  }

  ingest(kind, record, runId = this.runId) {
    this.records++;
    if (kind === 'iteration') this.addIteration(record);
    else if (kind === 'request_start') this.addStart(record);
    else if (kind === 'request_end') this.addEnd(record);
    else if (kind === 'run') this.addRun(record);
    else if (kind === 'hello') this.greet(record, runId);
    else if (kind === 'lost') this.lose(record);
    else if (kind === 'fault') this.fault = record;
    else if (kind === 'rejection') this.rejections++;
  }

  // A hello of another run begins anew; one of the same run follows a loss: its live set is the
  // truth, so whoever is not in it ended unseen.
  // `earlier`, of a past window, says what they had been through before it.
  greet({ run, live, lost, earlier = [] }, runId) {
    if (this.runId !== null && this.runId !== runId) this.restarts++;
    if (this.runId !== runId) this.clear();
    this.runId = runId;
    if (run) this.run = run;
    if (lost === 'unknown') {
      this.lostUnknown = true;
      this.holeNext = this.columns.count > 0;
    }
    const alive = new Set(live.map((start) => start.request));
    for (const r of [...this.live]) if (!alive.has(r.id)) this.vanish(r);
    for (const start of live) this.addStart(start);
    for (const r of this.live) r.last_token_ns = 0; // a gap across a hole is not a gap
    for (const past of earlier) recall(this.requests.get(past.request), past);
  }

  lose({ count }) {
    this.lostHere += count;
    if (this.asleep) this.lostAsleep += count;
    this.holeNext = true;
  }

  vanish(r) {
    r.state = 'unseen';
    this.live.delete(r);
    this.lanes.release(r, this.columns.newestNs);
    this.forget(r);
  }

  forget(r) {
    this.requests.delete(r.id);
    this.integers.delete(r.start?.request_id);
  }

  // The request of an id as clients know it, or null.
  find(requestId) {
    return this.requests.get(this.integers.get(requestId)) ?? null;
  }

  addRun(run) {
    this.run = run;
    this.engines++;
    this.fault = null;
  }

  request(id, now_ns) {
    const known = this.requests.get(id);
    if (known) return known;
    const r = newRequest(id);
    r.arrived_at_ns = now_ns;
    this.requests.set(id, r);
    this.live.add(r);
    this.lanes.take(r, now_ns);
    if (r.lane < 0) startWait(r, this.stop_ns);
    return r;
  }

  addStart(start) {
    const r = this.request(start.request, start.arrived_at_ns);
    const late = r.seen >= 0 && !r.start;
    setStart(r, start);
    this.integers.set(start.request_id, r.id);
    this.slo = objectives(start) || this.slo;
    if (!late || !this.columns.has(r.seen)) return;
    // Its first slices overtook it on the way here: catch up with what they showed.
    const end_at_ns = this.columns.end_at_ns[this.columns.slot(r.seen)];
    this.arrive(r);
    this.sample(r, end_at_ns, this.seconds.slot(end_at_ns));
  }

  // One iteration: advance every live request, and note what each lane shows in its tile.
  addIteration(record) {
    const hole = this.holeNext || record.lost_before > 0;
    this.lostAtSource += record.lost_before;
    this.openedSecond ??= Math.floor(record.begin_at_ns / 1e9);
    this.holeNext = false;
    const stop = STOPS.indexOf(record.admission_stop);
    const index = this.columns.append(record, stop, hole);
    const tile = { begin_at_ns: record.begin_at_ns, end_at_ns: record.end_at_ns, tokens: 0, hole };
    const second = this.seconds.iteration(record);
    this.enginesThen = this.engines;
    for (const r of this.lanes.settle(record.begin_at_ns)) endWait(r, this.stop_ns);
    this.preempt(record);
    record.admitted.forEach((id, i) => this.admit(record, id, record.admitted_cached_tokens[i]));
    for (let row = 0; row < record.requests.length; row++) {
      this.slice(record, row, { index, tile, second });
    }
    for (const id of record.finished) {
      const r = this.requests.get(id);
      if (r) r.finishing = true;
    }
    tile.tokens = 0;
    this.others(record, index, tile);
    this.stop_ns[stop] += record.end_at_ns - record.begin_at_ns;
  }

  preempt(record) {
    record.preempted.forEach((id, i) => {
      const r = this.requests.get(id);
      if (!r) return;
      r.state = 'preempted';
      r.reason = 'preempted_' + record.preempted_causes[i];
      r.computed = 0;
      r.blocks = 0;
      r.preemptions++;
      if (r.lane < 0) startWait(r, this.stop_ns, r.reason);
      this.columns.push(r.lane, KIND.PREEMPT, id, record.preempted_lost_tokens[i]);
    });
  }

  admit(record, id, cachedTokens) {
    const r = this.request(id, record.begin_at_ns);
    endWait(r, this.stop_ns);
    this.lanes.admit(r, record.begin_at_ns);
    r.state = 'running';
    r.reason = null;
    r.computed = cachedTokens;
    r.cached += cachedTokens;
    this.arrive(r);
    if (cachedTokens) this.columns.push(r.lane, KIND.HIT, id, cachedTokens);
  }

  // The mark stands at the arrival itself: its amount is microseconds after the tile's begin.
  arrive(r) {
    if (r.arrivalShown || !r.start) return;
    r.arrivalShown = true;
    const { columns } = this;
    const after_ns = r.arrived_at_ns - columns.begin_at_ns[columns.slot(columns.last)];
    if (Math.abs(after_ns) < ARRIVAL_NEAR_NS)
      columns.push(r.lane, KIND.ARRIVE, r.id, Math.round(after_ns / 1e3));
  }

  // One row of the batch. Position says the kind: below the highest position ever computed it is
  // recompute, else below the prompt's end prefill, else decode (DESIGN section 2).
  slice(record, row, { index, tile, second }) {
    const id = record.requests[row];
    const r = this.request(id, record.begin_at_ns);
    const start = record.start_positions[row],
      tokens = record.token_counts[row];
    const again = start < r.highest,
      kind = again ? KIND.RECOMPUTE : start < r.prompt_tokens ? KIND.PREFILL : KIND.DECODE;
    if (again) r.recomputed += Math.min(tokens, r.highest - start);
    r.seen = index;
    r.state = 'running';
    r.reason = null;
    r.computed = start + tokens;
    r.highest = Math.max(r.highest, r.computed);
    r.blocks = record.kv_block_counts[row];
    this.columns.push(r.lane, kind, id, tokens, start, r.blocks);
    tile.tokens = tokens;
    addSpan(r, kind, null, tile);
    this.sample(r, record.end_at_ns, second);
  }

  // The slice that reaches the last known token samples the next one; a later count than ours
  // means that records were lost in between, so its time is no gap.
  sample(r, end_at_ns, second) {
    const output = r.computed - r.prompt_tokens + 1;
    if (!(output > r.output)) return;
    if (output === 1) {
      r.first_token_ns = end_at_ns;
      this.columns.push(r.lane, KIND.FIRST, r.id);
      this.seconds.addFirstToken(second, end_at_ns - r.arrived_at_ns);
    } else if (output === r.output + 1 && r.last_token_ns) {
      const gap_ns = end_at_ns - r.last_token_ns;
      this.seconds.addGap(second, gap_ns);
      r.gap_ns += gap_ns;
      r.gaps++;
    }
    r.output = output;
    r.last_token_ns = end_at_ns;
  }

  // Those with a lane and no row: who waits, for what, and behind whom.
  others(record, index, tile) {
    const passed = new Map(record.passed_over.map((id, i) => [id, record.passed_over_reasons[i]]));
    const planned_at_ns =
      record.end_at_ns - record.plan_ns - record.launch_ns - record.wait_ns - record.commit_ns;
    for (const slot of this.lanes.slots) {
      const r = slot && slot.request;
      if (!r || r.seen === index || r.finishing || r.arrived_at_ns >= record.end_at_ns) continue;
      const [kind, detail] = this.idle(r, record, passed, planned_at_ns);
      if (kind === null) continue;
      this.arrive(r);
      const stop = kind === KIND.WAIT || kind === KIND.BEHIND ? record.admission_stop : null;
      this.columns.push(r.lane, kind, r.id, stop ? STOPS.indexOf(stop) : 0);
      addSpan(r, kind, detail, tile);
    }
  }

  idle(r, record, passed, planned_at_ns) {
    const stop = record.admission_stop;
    if (passed.has(r.id)) return [KIND.PASSED, passed.get(r.id)];
    if (r.state === 'preempted') return [KIND.PREEMPTED, r.reason];
    if (r.state === 'running') {
      return this.run && this.run.batching !== 'continuous'
        ? [KIND.HELD, 'batch_held']
        : [null, null];
    }
    if (record.admission_blocker === r.id) {
      r.reason = stop;
      return [KIND.WAIT, stop];
    }
    if (stop === 'no_waiting' || r.arrived_at_ns > planned_at_ns) return [KIND.NEXT, null];
    r.reason = stop;
    return [KIND.BEHIND, stop];
  }

  // An end belongs to the newest iteration: the server publishes it after its last step.
  addEnd(end) {
    const r = this.requests.get(end.request);
    if (!r || r.end) return;
    const { columns } = this;
    if (columns.count > columns.first) {
      const kind = { cancelled: KIND.CANCEL, error: KIND.ERROR }[end.finish] ?? KIND.FINISH;
      columns.push(r.lane, kind, r.id, end.output_tokens);
    }
    endWait(r, this.stop_ns);
    r.end = end;
    r.state = 'finished';
    r.blocks = 0;
    r.output = end.output_tokens;
    this.live.delete(r);
    this.lanes.release(r, Math.max(end.freed_at_ns ?? 0, end.decided_at_ns));
    this.judge(r, this.seconds.slot(end.released_at_ns));
    this.ended.push(r);
    if (this.ended.length > this.endedMax) this.forget(this.ended.shift());
  }

  judge(r, second) {
    const { seconds } = this,
      { end } = r;
    seconds.ended[second]++;
    if (end.finish === 'error') seconds.errors[second]++;
    if (end.finish === 'cancelled') seconds.cancelled[second]++;
    const slo = objectives(r.start);
    if (!slo || end.finish === 'cancelled') return;
    seconds.judged[second]++;
    if (end.finish === 'error' || end.first_token_at_ns === null) return;
    const first_ms = (end.first_token_at_ns - end.received_at_ns) / 1e6;
    const late = first_ms > (slo.ttft_ms ?? Infinity);
    if (!late && !((meanGapMs(r) ?? 0) > (slo.tpot_ms ?? Infinity))) seconds.good[second]++;
  }

  // Whether the engine of the newest iteration is gone: that iteration has no say of now.
  get gone() {
    return this.engines !== this.enginesThen || !!this.fault;
  }

  // What runs, waits and is held now. Only live requests do any of it. Who is live without an
  // engine waits for one, and the reusable blocks went with the last.
  present() {
    const { columns, gone } = this;
    const none = gone || columns.count === columns.first,
      idle = none || !this.live.size;
    const of = (name) => columns[name][columns.slot(columns.last)];
    return {
      running: idle ? 0 : of('running'),
      waiting: none ? this.live.size : idle ? 0 : of('waiting'),
      used: idle ? 0 : of('kv_blocks_used'),
      cached: none ? 0 : of('kv_blocks_cached'),
    };
  }

  // For how long no step has ended though somebody lives, who may have come just now.
  stillNs(now_ns) {
    const [oldest] = this.live;
    if (!oldest) return 0;
    return Math.max(0, now_ns - Math.max(this.columns.newestNs, oldest.arrived_at_ns));
  }

  name(id) {
    return this.requests.get(id)?.name ?? '#' + id;
  }
}
