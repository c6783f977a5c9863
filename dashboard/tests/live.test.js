// Owns: what the Live view may say: slow gaps are named, nobody who ended is listed as waiting, a
// full batch has all its lanes, and nothing of a dead engine is taken for now. Run by: node --test.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { overObjective, slowStep } from '../live/slow.js';
import { diagnose } from '../live/verdict.js';
import { Columns } from '../score/columns.js';
import { waiting } from '../score/queue.js';
import { Store } from '../score/store.js';
import { View } from '../score/view.js';
import { iteration, requestEnd, requestStart, run } from './support/records.js';

const LIVE = { link: 'live', silent_ns: 0 };

function decoding({ steps, slo = null, slow = 0 }) {
  const store = new Store({ columns: new Columns(256, 4096), lanes: 8 });
  store.ingest('hello', { run: run(), live: [], lost: 0 }, 'r');
  store.ingest('request_start', requestStart(1, { slo }));
  let now_ns = 0;
  for (let step = 1; step <= steps; step++) {
    const begin_at_ns = now_ns;
    now_ns += step === slow ? 120e6 : 10e6;
    const first = step === 1;
    const joins = step === slow ? [[2, 0, 40, 3]] : [];
    store.ingest(
      'iteration',
      iteration(step, {
        rows: [[1, first ? 0 : 6 + step, first ? 8 : 1, 1], ...joins],
        admitted: first ? [[1, 0]] : step === slow ? [[2, 0]] : [],
        begin_at_ns,
        end_at_ns: now_ns,
        device_ns: step === slow ? 110e6 : 9e6,
        decode_tokens: first ? 0 : 1,
        prefill_tokens: first ? 8 : step === slow ? 40 : 0,
      }),
    );
  }
  return store;
}

test('even steps are healthy; a step that held everybody up is named with its cause', () => {
  assert.equal(diagnose(decoding({ steps: 30 }), LIVE).head, 'Healthy');
  const store = decoding({ steps: 30, slow: 20 });
  store.ingest('request_start', requestStart(2, { prompt_tokens: 40 }));
  const v = diagnose(store, LIVE);
  assert.equal(v.head, 'A token came late');
  assert.equal(v.request, 2);
  assert.match(v.body, /step 20 took 120 ms instead of 10 ms for 1 decode, reading 40 prompt/);
  assert.match(v.body, /the device had 92 % of it/);
  assert.equal(slowStep(decoding({ steps: 5, slow: 3 })), null, 'too few steps to know the usual');
});

test('gaps over the objective of those who run are no health', () => {
  const slo = JSON.stringify({ ttft_ms: 1000, tpot_ms: 8 });
  const v = overObjective(decoding({ steps: 250, slo }));
  assert.equal(v.head, 'Token gaps are over their SLO');
  assert.match(v.body, /allowed 8\.0 ms/);
  assert.equal(overObjective(decoding({ steps: 250, slo: JSON.stringify({ tpot_ms: 20 }) })), null);
  assert.equal(overObjective(decoding({ steps: 250 })), null, 'nobody set one');
});

test('after an engine died nobody who ended waits, and who is left waits for another', () => {
  const store = new Store({ columns: new Columns(64, 1024), lanes: 8 });
  store.ingest('hello', { run: run(), live: [], lost: 0 }, 'r');
  store.ingest('run', run());
  for (const id of [1, 2, 3]) store.ingest('request_start', requestStart(id));
  store.ingest(
    'iteration',
    iteration(1, {
      rows: [[1, 0, 8, 1]],
      admitted: [[1, 0]],
      waiting: 2,
      kv_blocks_used: 5,
      admission_stop: 'seqs',
      admission_blocker: 2,
    }),
  );
  assert.equal(waiting(store, store.columns.last, true).length, 2);
  for (const id of [1, 2]) store.ingest('request_end', requestEnd(id, { finish: 'error' }));
  assert.deepEqual(waiting(store, store.columns.last, true).map(({ r }) => r.id), [3]);
  assert.equal(waiting(store, store.columns.last, false).length, 2, 'the past stays as it was');
  store.ingest('fault', { where: 'engine', error: 'gone', fault_at_ns: 2e7 });
  assert.deepEqual(store.present(), { running: 0, waiting: 1, used: 0, cached: 0 });
  store.ingest('request_end', requestEnd(3, { finish: 'error' }));
  assert.deepEqual(waiting(store, store.columns.last, true), []);
});

test('who runs has a lane, also when all others have ended this moment', () => {
  const store = new Store({ columns: new Columns(64, 1024), lanes: 2 });
  store.ingest('hello', { run: run(), live: [], lost: 0 }, 'r');
  for (const id of [1, 2, 3]) store.ingest('request_start', requestStart(id));
  const rows = (...ids) => ids.map((id) => [id, 0, 8, 1]);
  store.ingest('iteration', iteration(1, { rows: rows(1, 2), admitted: [[1, 0], [2, 0]] }));
  store.ingest('request_end', requestEnd(1, { freed_at_ns: 1e7, decided_at_ns: 1e7 }));
  store.ingest('iteration', iteration(2, { rows: rows(2, 3), admitted: [[3, 0]] }));
  assert.deepEqual(store.lanes.beyond, []);
  assert.equal(store.requests.get(3).lane, 0, 'a lane that has not rested');
});

test('a past window is shown whole, at any width, until somebody moves it', () => {
  const view = new View({ past: true });
  view.span(10e9, 70e9);
  view.fit(1200);
  assert.ok(Math.abs(view.left - 10e9) < 1 && view.right === 70e9);
  view.fit(600);
  assert.ok(Math.abs(view.left - 10e9) < 1);
  view.pan(60);
  view.fit(1200);
  assert.ok(view.right > 70e9 && view.scale === 10, 'moved: left as it is');
});
