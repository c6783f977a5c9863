// Owns: what the link must do: read each record once, resume, give up and come back, and say in
// words what was lost. Run by: node --test dashboard/tests/*.test.js. The EventSource and the
// timers are small fakes with the real ones' events; everything else is the page's own.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Clock } from '../live/clock.js';
import { Columns } from '../score/columns.js';
import { lostWord, notice } from '../live/notice.js';
import { Source, parsePosition } from '../live/source.js';
import { Store } from '../score/store.js';
import { diagnose } from '../live/verdict.js';
import { iteration, requestStart, run } from './support/records.js';

class FakeStream extends EventTarget {
  constructor(url) {
    super();
    this.url = url;
    this.readyState = 0;
  }
  say(kind, id, body) {
    const data = JSON.stringify(body);
    this.dispatchEvent(Object.assign(new Event(kind), { lastEventId: id, data }));
  }
  open() {
    this.readyState = 1;
    this.dispatchEvent(new Event('open'));
  }
  fail(readyState) {
    this.readyState = readyState;
    this.dispatchEvent(new Event('error'));
  }
  close() {
    this.readyState = 2;
  }
}

class FakeTimers {
  waiting = [];
  setTimeout(run, ms) {
    this.waiting.push({ run, ms });
  }
  clearTimeout() {}
  fire() {
    const { run, ms } = this.waiting.shift();
    run();
    return ms;
  }
}

function linked() {
  const streams = [],
    records = [],
    states = [],
    timers = new FakeTimers();
  const source = new Source({
    url: 'http://127.0.0.1:8000/telemetry/stream?kinds=run',
    onRecord: (kind, record, runId) => records.push([kind, record, runId]),
    onState: (state) => states.push(state),
    connect: (url) => {
      streams.push(new FakeStream(url));
      return streams.at(-1);
    },
    timers,
  });
  source.open();
  return { source, streams, records, states, timers };
}

test('positions are a run and a number, and nothing else is', () => {
  assert.deepEqual(parsePosition('a.b.17'), { runId: 'a.b', seq: 17 });
  for (const id of ['', 'abc', '.5', 'run.', 'run.x', 'run.1e400', 'run.1.5x']) {
    assert.equal(parsePosition(id), null, id);
  }
});

test('a record that comes twice is read once', () => {
  const { streams, records, source } = linked();
  streams[0].open();
  streams[0].say('hello', 'r.4', { live: [] });
  streams[0].say('fault', 'r.5', { n: 5 });
  streams[0].say('fault', 'r.5', { n: 5 });
  streams[0].say('fault', 'r.6', { n: 6 });
  assert.deepEqual(
    records.map(([kind, record]) => [kind, record.n]),
    [
      ['hello', undefined],
      ['fault', 5],
      ['fault', 6],
    ],
  );
  assert.equal(source.duplicates, 1);
});

test('the browser resumes by itself while it tries; then the page does, with its position', () => {
  const { streams, states, timers } = linked();
  streams[0].open();
  streams[0].say('hello', 'r.4', { live: [] });
  streams[0].fail(0);
  assert.equal(streams.length, 1, 'the browser is still trying');
  assert.deepEqual(states, ['live', 'disconnected']);
  streams[0].fail(2);
  assert.equal(timers.fire(), 500);
  const asked = new URL(streams[1].url);
  assert.equal(asked.searchParams.get('last_event_id'), 'r.4');
  assert.equal(asked.searchParams.get('kinds'), 'run');
  streams[1].fail(2);
  assert.equal(timers.fire(), 1000);
  streams[2].open();
  streams[2].say('fault', 'r.5', { n: 5 });
  assert.deepEqual(states, ['live', 'disconnected', 'live']);
});

test('an old stream that fails late does not take the new one down', () => {
  const { source, streams, states } = linked();
  streams[0].open();
  source.retryNow();
  streams[1].open();
  streams[0].fail(2);
  assert.deepEqual(states, ['live']);
});

test('another run is read from its first record, whatever the old position was', () => {
  const { streams, records } = linked();
  streams[0].say('hello', 'old.900', { live: [] });
  streams[0].say('hello', 'new.0', { live: [], lost: 'unknown' });
  streams[0].say('fault', 'new.1', { n: 1 });
  assert.deepEqual(
    records.map(([kind, , runId]) => [kind, runId]),
    [
      ['hello', 'old'],
      ['hello', 'new'],
      ['fault', 'new'],
    ],
  );
});

function stored() {
  const store = new Store({ columns: new Columns(64, 1024), lanes: 8 });
  store.ingest('hello', { run: run(), live: [], lost: 0 }, 'one');
  return store;
}
const live = { link: 'live', silent_ns: 0 };

test('a healthy link needs no banner; a broken one says what is the last it knows', () => {
  const store = stored();
  assert.equal(notice(store, 'live'), null);
  assert.equal(lostWord(store), '0 lost');
  store.ingest('iteration', iteration(12, {}));
  const down = notice(store, 'disconnected');
  assert.equal(down.level, 'bad');
  assert.match(down.body, /^Last record: step 12 at /);
  assert.equal(diagnose(store, { link: 'disconnected', silent_ns: 4e9 }).head, 'Unknown');
});

test('losses are told exactly, and whether anybody has the records', () => {
  const store = stored();
  store.ingest('lost', { from: 1, to: 33, count: 33 });
  assert.equal(notice(store, 'live').head, '33 records lost');
  assert.match(notice(store, 'live').body, /too slowly.*The history has them/);
  store.ingest('iteration', iteration(2, { lost_before: 2 }));
  assert.equal(notice(store, 'live').head, '35 records lost');
  assert.match(notice(store, 'live').body, /2 iterations never left the engine/);
});

test('a restart is told as such, and its loss is unknown', () => {
  const store = stored();
  store.ingest('hello', { run: null, live: [], lost: 'unknown' }, 'two');
  assert.equal(notice(store, 'live').head, 'The server restarted');
  assert.match(notice(store, 'live').body, /unknown/);
  assert.equal(lostWord(store), 'lost: unknown');
  assert.equal(diagnose(store, live).head, 'Starting');
});

test('the verdict names who stands in the way, and idles when nothing runs', () => {
  const store = stored();
  assert.equal(diagnose(store, live).head, 'Idle');
  for (const id of [1, 2, 3]) {
    store.ingest('request_start', requestStart(id, { prompt_tokens: 300 }));
  }
  const rows = [[1, 0, 4, 50]];
  const full = { admission_stop: 'kv', admission_blocker: 2, waiting: 2, kv_blocks_used: 50 };
  store.ingest('iteration', iteration(1, { rows, admitted: [[1, 0]], ...full }));
  const v = diagnose(store, live);
  assert.equal(v.head, 'KV is full');
  assert.equal(v.request, 2);
  const need = Math.ceil(301 / 16);
  assert.ok(v.body.includes(`needs ${need} blocks, 14 are available`), v.body);
  assert.ok(v.body.includes('holds 78 %'), v.body);
  assert.equal(store.stillNs(store.columns.newestNs + 7e9), 7e9);
  const stuck = diagnose(store, { link: 'live', silent_ns: 0, still_ns: 7e9 });
  assert.match(stuck.body, /^for 7 s, with 3 requests/);
});

test('the server’s time is learned from the record that was fastest', () => {
  const clock = new Clock();
  assert.equal(clock.known, false);
  clock.note(1e9, 5080); // 80 ms late
  clock.note(1.1e9, 5105); // 5 ms late
  clock.note(1.2e9, 5290);
  assert.equal(clock.nowNs(5305), 1.3e9);
  const busy = clock.edgeNs(8105, 1.2e9, true);
  assert.equal(busy, 4.1e9 - 120e6, 'while something runs, time goes on');
  const idle = clock.edgeNs(8105, 1.2e9, false);
  assert.equal(idle, 1.2e9 + 600e6, 'when nothing runs, the picture rests');
});

test('after a jump of a clock the server’s time is learned anew within a second', () => {
  const clock = new Clock();
  for (let i = 0; i < 10; i++) clock.note(i * 1e8, 5000 + i * 100);
  for (let i = 0; i <= 11; i++) clock.note(1e9 + i * 1e8, 66_000 + i * 100); // a minute is gone
  assert.equal(clock.nowNs(67_200), 2.2e9);
  clock.note(9e9, 67_300); // and back: no record is early
  assert.equal(clock.nowNs(67_300), 9e9);
});
