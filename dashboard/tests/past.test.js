// Owns: what a window of the past must show of those who were there before it, and its strips. Run
// by: node --test dashboard/tests/*.test.js. Records are those of tests/support/records.js.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { replay } from '../post-mortem/records.js';
import { KIND } from '../score/kinds.js';
import { Store } from '../score/store.js';
import { SCALES, paintBatch, rowsTop } from '../score/strips.js';
import { iteration, requestStart, run } from './support/records.js';

const NAME = Object.fromEntries(Object.entries(KIND).map(([name, kind]) => [kind, name]));

function shown({ columns }) {
  const out = [];
  for (let k = 0; k < columns.ops(columns.last); k++) {
    const op = columns.op(columns.last, k);
    out.push([NAME[columns.opKind[op]], columns.opRequest[op]]);
  }
  return out;
}

const parts = (...iterations) => ({
  run: [{ seq: 1, record: run() }],
  request_start: [1, 2, 3].map((id) => ({
    seq: 1 + id,
    record: requestStart(id, { prompt_tokens: 4 }),
  })),
  iteration: iterations.map((record, i) => ({ seq: 20 + i, record })),
  request_end: [],
  fault: [],
  rejection: [],
});

test('who was preempted before the window stands so in it, and computes again', () => {
  const earlier = [
    { request: 1, computed: 9, preemptions: 2, cause: 'kv' },
    { request: 2, computed: 4, preemptions: 1, cause: null },
  ];
  const given = parts(
    iteration(20, { rows: [[2, 0, 4, 1]], admission_stop: 'kv', admission_blocker: 3 }),
    iteration(21, { rows: [[1, 0, 10, 1], [2, 4, 1, 1]], admitted: [[1, 0]] }),
  );
  const store = new Store();
  const [hello, first, second] = replay(given, [], 0, earlier);
  for (const { kind, record } of [hello, first]) store.ingest(kind, record, 'run');
  const bodies = new Set(['RECOMPUTE', 'PREEMPTED', 'WAIT', 'PREFILL', 'DECODE']);
  const drawn = () => shown(store).filter(([kind]) => bodies.has(kind)).sort();
  assert.deepEqual(drawn(), [
    ['PREEMPTED', 1],
    ['RECOMPUTE', 2],
    ['WAIT', 3],
  ]);
  assert.equal(store.requests.get(1).preemptions, 2);
  assert.ok(!shown(store).some(([kind]) => kind === 'FIRST'), 'its first token was long ago');
  store.ingest(second.kind, second.record, 'run');
  assert.deepEqual(drawn(), [
    ['DECODE', 2],
    ['RECOMPUTE', 1],
  ]);
  assert.equal(store.requests.get(1).output, 7, 'the slice that reached its end sampled');
});

test('a decode of eight can be read beside a prompt of five hundred', () => {
  const store = new Store();
  store.ingest('hello', { run: run({ seqs_max: 8 }), live: [], lost: 0 }, 'run');
  store.ingest('iteration', iteration(1, { prefill_tokens: 504, decode_tokens: 8 }));
  const scales = {};
  for (const [name, { measure, create }] of Object.entries(SCALES)) {
    scales[name] = create();
    scales[name].fit(measure(store.columns, 0), 0);
  }
  const bars = [];
  const ctx = {
    fillRect(x, y, w, h) {
      bars.push({ fill: ctx.fillStyle, y, h });
    },
  };
  const c = { decode: 'decode', prefill: 'prefill', ratio: 1 };
  const height = 80;
  paintBatch(ctx, c, store.columns, 0, { x0: 0, x1: 20, height, at: Number, scales });
  const of = (fill) => bars.find((bar) => bar.fill === fill);
  assert.ok(of('decode').h > 0.35 * height, 'a full batch of rows fills its storey');
  assert.ok(of('prefill').h > 0.45 * height);
  assert.ok(of('prefill').y + of('prefill').h < rowsTop(height), 'storeys do not meet');
});
