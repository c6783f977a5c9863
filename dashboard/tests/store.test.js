// Owns: what the store must make of records: joins, waits and their reasons, recompute, ends,
// losses, restarts, and bounded memory. Run by: node --test dashboard/tests/*.test.js. Records come
// from small builders here or from the simulated engine; nothing of the store is replaced.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Columns } from '../score/columns.js';
import { heldUp } from '../live/ended.js';
import { KIND, STOPS, isMark, isSlice } from '../score/kinds.js';
import { holders } from '../score/kvmap.js';
import { waiting } from '../score/queue.js';
import { Store } from '../score/store.js';
import { iteration, requestEnd, requestStart, run } from './support/records.js';
import { Simulation } from './support/simulate.js';

const small = () => new Store({ columns: new Columns(64, 1024), lanes: 8, endedMax: 16 });

function opened(live = [], store = small()) {
  store.ingest('hello', { schema_version: 1, run: run(), live, lost: 0 }, 'one');
  return store;
}

// What each lane shows in an iteration, as [kind name, request] pairs.
function shown(store, index = store.columns.last) {
  const names = Object.fromEntries(Object.entries(KIND).map(([name, kind]) => [kind, name]));
  const { columns } = store;
  return Array.from({ length: columns.ops(index) }, (_, k) => {
    const op = columns.op(index, k);
    return [names[columns.opKind[op]], columns.opRequest[op]];
  });
}

test('a request joins, reads its prompt in chunks, decodes and leaves', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1, { prompt_tokens: 6 }));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  assert.deepEqual(shown(store), [
    ['ARRIVE', 1],
    ['PREFILL', 1],
  ]);
  store.ingest('iteration', iteration(2, { rows: [[1, 4, 2]] }));
  assert.deepEqual(shown(store), [
    ['PREFILL', 1],
    ['FIRST', 1],
  ]);
  store.ingest('iteration', iteration(3, { rows: [[1, 6, 1]], finished: [1] }));
  assert.deepEqual(shown(store), [['DECODE', 1]]);
  assert.equal(store.requests.get(1).output, 2);
  store.ingest('request_end', requestEnd(1, { output_tokens: 2 }));
  assert.deepEqual(shown(store), [
    ['DECODE', 1],
    ['FINISH', 1],
  ]);
  assert.equal(store.live.size, 0);
  assert.equal(store.ended.length, 1);
});

test('a prefix hit is marked at admission and is no recompute', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1, { prompt_tokens: 40 }));
  store.ingest('iteration', iteration(1, { rows: [[1, 32, 8]], admitted: [[1, 32]] }));
  assert.deepEqual(
    shown(store).map(([kind]) => kind),
    ['ARRIVE', 'HIT', 'PREFILL', 'FIRST'],
  );
});

test('the blocker waits for the reason, those behind it wait behind', () => {
  const store = opened();
  for (const id of [1, 2, 3]) store.ingest('request_start', requestStart(id));
  store.ingest(
    'iteration',
    iteration(1, {
      rows: [[1, 0, 4]],
      admitted: [[1, 0]],
      admission_stop: 'kv',
      admission_blocker: 2,
      waiting: 2,
    }),
  );
  const bodies = shown(store).filter(([kind]) => kind !== 'ARRIVE');
  const kinds = Object.fromEntries(bodies.map(([kind, id]) => [id, kind]));
  assert.deepEqual(kinds, { 1: 'PREFILL', 2: 'WAIT', 3: 'BEHIND' });
  const list = waiting(store, store.columns.last);
  assert.deepEqual(
    list.map(({ r }) => r.id),
    [2, 3],
  );
  assert.equal(store.requests.get(3).reason, 'kv');
  assert.equal(STOPS[store.columns.stop[store.columns.slot(store.columns.last)]], 'kv');
});

test('one that came after the plan waits for the next step, not for a reason', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  const late = iteration(2, { rows: [[1, 4, 1]], admission_stop: 'no_waiting' });
  store.ingest('request_start', requestStart(2, { arrived_at_ns: late.end_at_ns - 1000 }));
  store.ingest('iteration', late);
  assert.ok(shown(store).some(([kind, id]) => kind === 'NEXT' && id === 2));
  assert.equal(store.requests.get(2).reason, null);
});

test('a preempted request shows its loss, its absence, and what it computes again', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1, { prompt_tokens: 4 }));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('iteration', iteration(2, { rows: [[1, 4, 1]] }));
  store.ingest(
    'iteration',
    iteration(3, { preempted: [[1, 'kv', 1, 5]], admission_stop: 'kv', admission_blocker: 1 }),
  );
  assert.deepEqual(shown(store), [
    ['PREEMPT', 1],
    ['PREEMPTED', 1],
  ]);
  const r = store.requests.get(1);
  assert.equal(r.reason, 'preempted_kv');
  assert.equal(r.output, 2);
  store.ingest('iteration', iteration(4, { rows: [[1, 0, 6]], admitted: [[1, 0]] }));
  assert.deepEqual(shown(store), [
    ['RECOMPUTE', 1],
  ]);
  assert.equal(r.recomputed, 5, 'the sixth position is new');
  assert.equal(r.output, 3, 'the slice that reached the last known token sampled');
  assert.equal(r.preemptions, 1);
});

test('a chunk of a recompute samples nothing', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1, { prompt_tokens: 2 }));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 2]], admitted: [[1, 0]] }));
  for (let at = 2; at < 6; at++) store.ingest('iteration', iteration(at, { rows: [[1, at, 1]] }));
  const r = store.requests.get(1);
  assert.equal(r.output, 5);
  store.ingest('iteration', iteration(6, { preempted: [[1, 'kv', 1, 6]] }));
  store.ingest('iteration', iteration(7, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  assert.equal(r.output, 5);
  store.ingest('iteration', iteration(8, { rows: [[1, 4, 3]] }));
  assert.equal(r.output, 6);
});

test('running requests given no tokens were passed over, for the reason on record', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('iteration', iteration(2, { passed_over: [[1, 'budget']] }));
  assert.deepEqual(shown(store), [['PASSED', 1]]);
  assert.equal(store.requests.get(1).waits.get('budget'), 10e6);
});

test('a fixed batch holds the rows of those that finished', () => {
  const store = small();
  store.ingest('hello', { run: run({ batching: 'static' }), live: [], lost: 0 }, 'one');
  store.ingest('request_start', requestStart(1));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('iteration', iteration(2, { idle_rows: 1 }));
  assert.deepEqual(shown(store), [['HELD', 1]]);
});

test('cancel and error end a request with their own marks', () => {
  const store = opened();
  for (const id of [1, 2]) store.ingest('request_start', requestStart(id));
  const rows = [
    [1, 0, 4],
    [2, 0, 4],
  ];
  store.ingest('iteration', iteration(1, { rows, admitted: [[1, 0], [2, 0]] }));
  store.ingest('request_end', requestEnd(1, { finish: 'cancelled' }));
  store.ingest('request_end', requestEnd(2, { finish: 'error', error: 'engine died' }));
  const marks = shown(store).filter(([kind]) => isMark(KIND[kind]) && kind !== 'ARRIVE');
  assert.deepEqual(marks.slice(-2), [
    ['CANCEL', 1],
    ['ERROR', 2],
  ]);
  const s = store.seconds.of(0);
  assert.deepEqual([store.seconds.ended[s], store.seconds.errors[s]], [2, 1]);
});

test('one that ends has given its blocks back and holds none', () => {
  const store = opened();
  for (const id of [1, 2]) store.ingest('request_start', requestStart(id));
  const rows = [
    [1, 0, 4, 3],
    [2, 0, 4, 5],
  ];
  const lists = { rows, admitted: [[1, 0], [2, 0]], kv_blocks_used: 3, finished: [2] };
  store.ingest('iteration', iteration(1, lists));
  store.ingest('request_end', requestEnd(2));
  assert.deepEqual(holders(store.columns, store.columns.last), [[1, 3]]);
});

test('a start that its first slices overtook is caught up with', () => {
  const store = opened();
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('request_start', requestStart(1, { prompt_tokens: 4 }));
  assert.deepEqual(
    shown(store).map(([kind]) => kind),
    ['PREFILL', 'ARRIVE', 'FIRST'],
  );
  assert.equal(store.requests.get(1).output, 1);
  assert.equal(store.live.size, 1);
});

test('a page that opens in the middle knows who is live and invents no first token', () => {
  const store = opened([requestStart(7, { prompt_tokens: 10 })]);
  store.ingest('iteration', iteration(90, { rows: [[7, 30, 1]] }));
  assert.deepEqual(shown(store), [['DECODE', 7]]);
  assert.equal(store.requests.get(7).output, 22);
  assert.equal(store.seconds.quantile('firstToken', 0.5, 0, 60), null);
});

test('lost records leave a hole, a count, no ghost and no gap across it', () => {
  const store = opened();
  for (const id of [1, 2]) store.ingest('request_start', requestStart(id, { prompt_tokens: 4 }));
  const rows = [
    [1, 0, 4],
    [2, 0, 4],
  ];
  store.ingest('iteration', iteration(1, { rows, admitted: [[1, 0], [2, 0]] }));
  store.ingest('lost', { from: 5, to: 37, count: 33 });
  const live = [requestStart(2, { prompt_tokens: 4 }), requestStart(3)];
  store.ingest('hello', { run: run(), live, lost: 0 }, 'one');
  assert.deepEqual([...store.live].map((r) => r.id).sort(), [2, 3]);
  assert.equal(store.lostHere, 33);
  assert.equal(store.restarts, 0);
  store.ingest('iteration', iteration(20, { rows: [[2, 20, 1]] }));
  assert.equal(store.columns.hole[store.columns.slot(store.columns.last)], 1);
  assert.equal(store.seconds.quantile('gap', 0.5, 0, 60), null);
  assert.equal(store.requests.get(2).output, 18);
  store.ingest('iteration', iteration(21, { rows: [[2, 21, 1]] }));
  assert.equal(store.columns.hole[store.columns.slot(store.columns.last)], 0);
  const gap = store.seconds.quantile('gap', 0.5, 0, 60);
  assert.ok(Math.abs(gap - 10) < 0.3, `10 ms, within a bucket: ${gap}`);
});

test('iterations that the engine dropped are counted apart and leave a hole', () => {
  const store = opened();
  store.ingest('request_start', requestStart(1, { prompt_tokens: 4 }));
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('iteration', iteration(5, { rows: [[1, 7, 1]], lost_before: 3 }));
  assert.deepEqual([store.lostHere, store.lostAtSource], [0, 3]);
  assert.equal(store.columns.hole[store.columns.slot(store.columns.last)], 1);
});

test('a restarted server begins anew: no ghost, no old number, and the loss is unknown', () => {
  const store = opened([requestStart(1)]);
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]] }));
  store.ingest('hello', { run: null, live: [], lost: 'unknown' }, 'two');
  assert.equal(store.runId, 'two');
  assert.equal(store.restarts, 1);
  assert.equal(store.lostUnknown, true);
  assert.equal(store.live.size, 0);
  assert.equal(store.requests.size, 0);
  assert.equal(store.columns.count, 0);
  assert.equal(store.run, null);
  assert.equal(store.seconds.sum('decode', 0, 100), 0);
  store.ingest('run', run({ model: 'other' }));
  assert.equal(store.run.model, 'other');
});

test('an engine that dies leaves its fault on show until the next one is ready', () => {
  const store = opened();
  store.ingest('fault', { fault_at_ns: 5, step: 3, where: 'engine', error: 'died', traceback: '' });
  assert.equal(store.fault.error, 'died');
  store.ingest('run', run());
  assert.equal(store.fault, null);
});

test('requests beyond the last lane are kept in order and take the lanes that come free', () => {
  const store = opened();
  for (let id = 1; id <= 10; id++) store.ingest('request_start', requestStart(id));
  assert.equal(store.lanes.beyond.length, 2);
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('request_end', requestEnd(1));
  store.ingest('request_end', requestEnd(10));
  assert.deepEqual(
    store.lanes.beyond.map((r) => r.id),
    [9],
  );
  store.ingest('iteration', iteration(200, {}));
  assert.equal(store.requests.get(9).lane, 0);
  assert.equal(store.lanes.beyond.length, 0);
});

test('20,000 iterations of mixed load stay inside every bound and agree with the engine', () => {
  const store = new Store({ columns: new Columns(4096, 1 << 16), lanes: 32, endedMax: 256 });
  const engine = new Simulation();
  store.ingest('hello', { run: engine.run(), live: [], lost: 0 }, 'sim');
  let steps = 0,
    decoded = 0;
  while (steps < 20000) {
    for (const [kind, record] of engine.advance(engine.now + 1e9)) {
      store.ingest(kind, record);
      if (kind !== 'iteration') continue;
      steps++;
      decoded += record.decode_tokens;
    }
    check(store, engine);
  }
  assert.ok(decoded > 50000, 'the load was real');
  assert.ok(store.columns.count - store.columns.first <= 4096);
  assert.ok(store.columns.opHead > 1 << 17, 'the ring went round');
  assert.ok(store.ended.length <= 256 && store.requests.size <= 256 + store.live.size);
  for (const r of store.requests.values()) assert.ok(r.spans.length <= 64 && r.waits.size < 20);
});

function check(store, engine) {
  const { columns } = store;
  assert.deepEqual(
    [...store.live].map((r) => r.id).sort((a, b) => a - b),
    engine.live.map((start) => start.request).sort((a, b) => a - b),
  );
  for (const r of engine.running) {
    const ours = store.requests.get(r.id);
    assert.deepEqual([ours.output, ours.computed], [r.output, r.computed], `request ${r.id}`);
  }
  let tokens = 0;
  const lanes = new Set();
  for (let k = 0; k < columns.ops(columns.last); k++) {
    const op = columns.op(columns.last, k),
      kind = columns.opKind[op];
    if (isSlice(kind)) tokens += columns.opAmount[op];
    if (isMark(kind) || columns.opLane[op] < 0) continue;
    assert.ok(!lanes.has(columns.opLane[op]), 'a lane shows one thing at a time');
    lanes.add(columns.opLane[op]);
  }
  const s = columns.slot(columns.last);
  assert.equal(tokens, columns.prefill_tokens[s] + columns.decode_tokens[s]);
}

test('time waited without a lane is booked by its reason all the same', () => {
  const store = opened();
  for (let id = 1; id <= 9; id++) store.ingest('request_start', requestStart(id));
  const stopped = { admission_stop: 'seqs', admission_blocker: 2, waiting: 8 };
  store.ingest('iteration', iteration(1, { rows: [[1, 0, 4]], admitted: [[1, 0]], ...stopped }));
  store.ingest('iteration', iteration(2, { rows: [[1, 4, 4]], ...stopped }));
  const last = store.requests.get(9);
  assert.equal(last.lane, -1);
  assert.deepEqual(
    waiting(store, store.columns.last).map(({ r }) => r.id),
    [2, 3, 4, 5, 6, 7, 8, 9],
  );
  store.ingest('iteration', iteration(3, { rows: [[9, 0, 4]], admitted: [[9, 0]] }));
  assert.deepEqual([...last.waits], [['seqs', 20e6]]);
});

test('an engine that is gone holds nothing and runs nothing, whatever its last record said', () => {
  const store = opened();
  assert.deepEqual(store.present(), { running: 0, waiting: 0, used: 0, cached: 0 });
  store.ingest('request_start', requestStart(1));
  const busy = { rows: [[1, 0, 4, 9]], admitted: [[1, 0]], kv_blocks_used: 9, kv_blocks_cached: 4 };
  store.ingest('iteration', iteration(1, { ...busy, waiting: 3 }));
  assert.deepEqual(store.present(), { running: 1, waiting: 3, used: 9, cached: 4 });
  store.ingest('fault', { fault_at_ns: 9, step: 1, where: 'engine', error: 'died', traceback: '' });
  store.ingest('request_end', requestEnd(1, { finish: 'error' }));
  assert.deepEqual(store.present(), { running: 0, waiting: 0, used: 0, cached: 0 });
  store.ingest('run', run());
  assert.deepEqual(store.present(), { running: 0, waiting: 0, used: 0, cached: 0 });
});

test('a long queue gets lanes for its head only; who is admitted gets one at once', () => {
  const store = new Store({ columns: new Columns(64, 1024), lanes: 64 });
  opened([], store);
  for (let id = 1; id <= 30; id++) store.ingest('request_start', requestStart(id));
  assert.equal(store.lanes.inUse, 12);
  assert.equal(store.lanes.beyond.length, 18);
  store.ingest('iteration', iteration(1, { rows: [[25, 0, 4]], admitted: [[25, 0]] }));
  assert.equal(store.requests.get(25).lane, 12);
  assert.equal(store.lanes.beyond.length, 17);
  store.ingest('iteration', iteration(2, { rows: [[1, 0, 4]], admitted: [[1, 0]] }));
  store.ingest('iteration', iteration(3, { rows: [[1, 4, 4]] }));
  assert.equal(store.requests.get(13).lane, 13, 'the next of the queue has moved up');
});

test('what held a request up is told from its own record, also before the page was open', () => {
  const store = opened([requestStart(1)]);
  store.ingest('iteration', iteration(1, { admission_stop: 'kv', admission_blocker: 1 }));
  const times = { arrived_at_ns: 0, admitted_at_ns: 50e6, released_at_ns: 60e6 };
  store.ingest('request_end', requestEnd(1, times));
  assert.deepEqual(heldUp(store.ended[0]), ['kv', 50e6]);
  store.ingest('request_start', requestStart(2));
  store.ingest('request_end', requestEnd(2, times));
  assert.deepEqual(heldUp(store.ended[1]), ['queued', 50e6]);
});
