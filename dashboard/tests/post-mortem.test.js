// Owns: what the pure modules of Post-mortem and Compare must do: an address that says all, rows
// that become the records they were, SQL cut and completed, errors placed, charts chosen, falls
// that sum. Run by: node --test. Records come from the builders beside it; nothing is replaced.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { falls, scaleOf } from '../compare/falls.js';
import { bodyOf as bodyOfSides, readSides, writeSides } from '../compare/sides.js';
import {
  EMPTY,
  instantText,
  instantUs,
  readAddress,
  writeAddress,
} from '../post-mortem/address.js';
import { chartOf } from '../post-mortem/chart.js';
import { csv } from '../post-mortem/csv.js';
import { bodyOf, faultOf, inputsOf } from '../post-mortem/inputs.js';
import { placeOf } from '../post-mortem/place.js';
import { SHOWN_KINDS, pageOf, readPage, replay } from '../post-mortem/records.js';
import { suggest } from '../post-mortem/suggest.js';
import { tokens } from '../post-mortem/tokens.js';
import { DRAWN_MOST, excess, narrower, within } from '../post-mortem/window.js';
import { iteration, requestEnd, requestStart, run } from './support/records.js';

// ---- the address

test('an address says all there is and nothing else', () => {
  const state = {
    ...EMPTY,
    file: '20261130-slo.duckdb',
    run: '20261130T060000-abc123',
    from_us: 1796019809_123456,
    to_us: 1796019810_000000,
    show: 'query',
    query: 'longest_waits',
    values: { requests: '5' },
  };
  const written = writeAddress(state);
  assert.equal(written.from, '2026-11-30T06:23:29.123456Z');
  assert.deepEqual({ ...readAddress(written) }, state);
  assert.deepEqual({ ...readAddress(new URLSearchParams(written)) }, state);
  assert.deepEqual(writeAddress(EMPTY), {});
});

test('free SQL is in the address, and garbage is not believed', () => {
  const sql = 'SELECT \'ä & b\' AS "x" -- 100 %\n';
  const state = { ...EMPTY, show: 'query', sql };
  assert.equal(
    readAddress(new URLSearchParams(writeAddress(state)).toString() && writeAddress(state)).sql,
    sql,
  );
  for (const given of [
    { from: 'yesterday', to: 'now' },
    { from: '2026-11-30T07:00:00Z', to: '2026-11-30T06:00:00Z' },
    { from: '2026-11-30T07:00:00Z' },
    { show: 'nothing' },
  ]) {
    assert.deepEqual({ ...readAddress(given) }, { ...EMPTY });
  }
});

test('instants keep their microseconds and take zones', () => {
  for (const us of [0, 1796019809_000001, 1796019809_100000, 1796019809_000000]) {
    assert.equal(instantUs(instantText(us)), us);
  }
  assert.equal(instantUs('2026-11-30T07:23:29+01:00'), instantUs('2026-11-30T06:23:29Z'));
  assert.equal(instantUs('2026-11-30T06:23'), instantUs('2026-11-30T06:23:00Z'));
});

// ---- windows

test('a window stays within its run, and what is too much is made narrower', () => {
  assert.deepEqual(within([-5e6, 5e6], [0, 60e6]), [0, 10e6]);
  assert.deepEqual(within([55e6, 65e6], [0, 60e6]), [50e6, 60e6]);
  assert.deepEqual(within([0, 90e6], [0, 60e6]), [0, 60e6]);
  const counts = { iterations: DRAWN_MOST.iterations * 4, slices: 10 };
  assert.equal(excess(counts), 4);
  const weights = Array.from({ length: 60 }, (_, i) => ({
    at_us: i * 1e6,
    weight: i === 40 ? 9 : 0,
  }));
  const offers = narrower([0, 60e6], counts, weights);
  for (const { window } of offers) assert.ok(window[1] - window[0] < 15e6 && window[0] >= 0);
  const [from, to] = offers[0].window;
  assert.ok(from <= 40e6 && 40e6 <= to);
  assert.equal(narrower([0, 60e6], counts).length, 2, 'without a queue there is no longest one');
});

// ---- rows to records

function answerOf(placed, { truncated = false } = {}) {
  const names = ['generation', 'seq', ...Object.keys(placed[0]?.[1] ?? {})];
  const rows = placed.map(([seq, record]) => [1, seq, ...Object.values(record)]);
  return { columns: names.map((name) => ({ name, type: 'X' })), rows, truncated };
}

test('rows become the records they were, and a page knows whether there is more', () => {
  const step = iteration(3, { rows: [[7, 0, 8, 1]] });
  const page = readPage(answerOf([[12, step]], { truncated: true }));
  assert.deepEqual(page.placed, [{ seq: 12, record: step }]);
  assert.equal(page.after, 12);
  assert.equal(readPage(answerOf([[12, step]])).after, null);
  for (const kind of SHOWN_KINDS) {
    for (const place of ['$1', '$2', '$3', '$4']) assert.ok(pageOf(kind).includes(place), kind);
  }
});

test('a replay is what the stream would have sent: what lived, then all in its place', () => {
  const first = run({ generation: 1 }),
    second = run({ generation: 2 });
  const parts = {
    run: [
      { seq: 1, record: first },
      { seq: 40, record: second },
    ],
    request_start: [
      { seq: 2, record: requestStart(1) },
      { seq: 21, record: requestStart(2) },
    ],
    iteration: [
      { seq: 20, record: iteration(20) },
      { seq: 30, record: iteration(21) },
    ],
    request_end: [{ seq: 22, record: requestEnd(1) }],
    fault: [],
    rejection: [],
  };
  const fed = replay(parts, [[23, 29, 7]], 0);
  assert.deepEqual(
    fed.map(({ kind, seq }) => [kind, seq]),
    [
      ['hello', 19],
      ['iteration', 20],
      ['request_start', 21],
      ['request_end', 22],
      ['lost', 29],
      ['iteration', 30],
      ['run', 40],
    ],
  );
  assert.equal(fed[0].record.run, first);
  assert.deepEqual(
    fed[0].record.live.map(({ request }) => request),
    [1],
  );
  assert.equal(fed[4].record.count, 7);
});

// ---- SQL

const schema = {
  tables: {
    iteration: { doc: 'A step.', columns: [{ name: 'step', type: 'BIGINT', unit: '', doc: '' }] },
    fault: { doc: 'A fault.', columns: [{ name: 'where', type: 'VARCHAR', unit: '', doc: '' }] },
  },
  views: {
    slice: { doc: 'Rows.', columns: [{ name: 'request', type: 'BIGINT', unit: '', doc: '' }] },
  },
};
const offered = (sql, caret = sql.length, more) =>
  suggest(sql, caret, schema, more)?.offers.map(({ text }) => text) ?? [];

test('tokens lose no character and tell what they are', () => {
  const sql = `WITH a AS (SELECT sum(x) /* so */ FROM "odd ""t""" -- end
    WHERE y = 'it''s' AND z > 1.5e3 AND é = $last_s) ¤ 'open`;
  const all = tokens(sql);
  assert.equal(all.map(({ text }) => text).join(''), sql);
  const of = (text) => all.find((token) => token.text === text).kind;
  assert.deepEqual(
    ['WITH', 'sum', '"odd ""t"""', "'it''s'", '1.5e3', '$last_s', 'é', '-- end', "'open"].map(of),
    ['keyword', 'call', 'name', 'text', 'number', 'parameter', 'name', 'comment', 'text'],
  );
});

test('completion offers tables after FROM and columns of what is in reach', () => {
  assert.deepEqual(offered('SELECT * FROM it'), ['iteration']);
  assert.deepEqual(offered('SELECT i. FROM iteration AS i', 9), ['step']);
  assert.deepEqual(offered('SELECT s.re FROM iteration i JOIN slice s USING (step)', 11), [
    'request',
  ]);
  assert.equal(offered('SELECT ste FROM iteration', 10)[0], 'step');
  assert.deepEqual(
    offered('SELECT wher FROM fault', 11).slice(0, 1),
    ['WHERE'],
    'reserved names are quoted',
  );
  assert.ok(offered('WITH mine AS (SELECT 1) SELECT * FROM mi').includes('mine'));
});

test('completion is quiet in texts and comments, and when all is written', () => {
  assert.equal(suggest("SELECT 'it", 10, schema), null);
  assert.equal(suggest('-- it', 5, schema), null);
  assert.equal(suggest('SELECT 1 ', 9, schema), null);
  assert.ok(offered('SELECT ', 7, { asked: true }).length > 0);
  assert.equal(suggest('SELECT * FROM iteration', 23, schema), null);
});

test('a place is found behind characters of two units', () => {
  const sql = 'SELECT 1 AS "😀",\n  nothing FROM run';
  const position = [...sql].join('').indexOf('nothing') - 1; // one character, two units
  const place = placeOf(sql, position);
  assert.equal(sql.slice(place.index, place.index + place.length), 'nothing');
  assert.deepEqual([place.line, place.column], [2, 3]);
  assert.equal(placeOf(sql, null), null);
});

// ---- parameters

const query = {
  windowed: true,
  parameters: [
    {
      name: 'from_unix_us',
      type: 'integer',
      default: null,
      min: 0,
      max: 4e15,
      required: false,
      doc: '',
    },
    { name: 'run_id', type: 'text', default: null, min: null, max: null, required: false, doc: '' },
    {
      name: 'rows',
      type: 'integer',
      default: 10,
      min: 1,
      max: 100,
      required: false,
      doc: 'how many',
    },
    { name: 'id', type: 'text', default: null, min: null, max: null, required: true, doc: 'whose' },
  ],
};

test('parameters are inputs; the window is the picker’s', () => {
  const inputs = inputsOf(query, { rows: '5' });
  assert.deepEqual(
    inputs.map(({ name, value }) => [name, value]),
    [
      ['rows', '5'],
      ['id', ''],
    ],
  );
  const [rows, id] = inputs;
  assert.equal(faultOf(rows, '5'), null);
  for (const bad of ['0', '101', '1.5', 'x']) assert.match(faultOf(rows, bad), /^rows /);
  assert.match(faultOf(id, ''), /needed/);
  const place = { from_us: 10.4, to_us: 20.2, run: 'one' };
  assert.deepEqual(bodyOf(query, { rows: '5', id: 'req-1', run_id: 'two' }, place), {
    rows: 5,
    id: 'req-1',
    from_unix_us: 10,
    to_unix_us: 21,
    run_id: 'one',
  });
  assert.deepEqual(bodyOf({ ...query, windowed: false }, { id: 'x' }, place), { id: 'x' });
});

// ---- answers

const answer = (columns, rows) => ({
  columns: columns.map(([name, type]) => ({ name, type })),
  rows,
});

test('CSV is what a spreadsheet reads', () => {
  const found = csv(
    answer(
      [
        ['a,b', 'X'],
        ['c', 'X'],
      ],
      [
        ['x "y"\n', null],
        [true, [1, 2]],
      ],
    ),
  );
  assert.equal(found, '"a,b",c\r\n"x ""y""\n",\r\ntrue,"[1,2]"\r\n');
});

test('a chart is what the query says, or what the columns look like', () => {
  const time = answer(
    [
      ['at_unix_us', 'BIGINT'],
      ['n', 'BIGINT'],
      ['who', 'VARCHAR'],
    ],
    [
      [2e6, 5, 'b'],
      [1e6, null, 'a'],
    ],
  );
  const lines = chartOf(time);
  assert.deepEqual([lines.kind, lines.time, lines.x], ['lines', true, [1, 2]]);
  assert.deepEqual(lines.series, [{ name: 'n', values: [null, 5] }]);
  assert.equal(chartOf(time, 'table'), null);
  const causes = answer(
    [
      ['cause', 'VARCHAR'],
      ['ms', 'DOUBLE'],
    ],
    Array.from({ length: 30 }, (_, i) => ['c' + i, i]),
  );
  const bars = chartOf(causes);
  assert.deepEqual([bars.kind, bars.x.length, bars.left_out], ['bars', 24, 6]);
});

test('numbers against numbers are dots, words are none, instants count as seconds', () => {
  const knee = answer(
    [
      ['b', 'BIGINT'],
      ['t', 'DOUBLE'],
    ],
    [
      [2, 1],
      [1, 3],
      [3, 2],
    ],
  );
  assert.equal(chartOf(knee).kind, 'scatter');
  assert.deepEqual(chartOf(knee, 'scatter').x, [1, 2, 3]);
  assert.equal(
    chartOf(
      answer(
        [
          ['a', 'VARCHAR'],
          ['b', 'VARCHAR'],
        ],
        [['x', 'y']],
      ),
    ),
    null,
  );
  assert.equal(chartOf(answer([['a', 'BIGINT']], [[1]])), null);
  const columns = [
    ['at', 'TIMESTAMP'],
    ['n', 'DOUBLE'],
  ];
  const stamped = ['1970-01-01T00:00:01', '1970-01-01T00:00:02'].map((at) => [at, 1]);
  assert.deepEqual(chartOf(answer(columns, stamped)).x, [1, 2]);
});

// ---- a comparison

const change = (name, a, b, verdict = 'same') => ({
  name,
  unit: 'ms',
  a,
  b,
  low: null,
  high: null,
  verdict,
});

test('falls adjoin and end at B, whatever is too small to see', () => {
  const diff = {
    request: change('request', 100, 63),
    workload: change('workload', 0, -2),
    causes: [
      change('queue_kv', 40, 10, 'better'),
      change('own_decode', 50, 45),
      change('padding', 1, 1.1),
      change('scheduler', 1, 0.9),
    ],
  };
  const rows = falls(diff);
  assert.deepEqual(
    rows.map(({ name, kind }) => [name, kind]),
    [
      ['A', 'total'],
      ['queue_kv', 'less'],
      ['own_decode', 'less'],
      ['other lengths', 'less'],
      ['2 smaller', 'rest'],
      ['B', 'total'],
    ],
  );
  for (let i = 2; i < rows.length - 1; i++) assert.equal(rows[i].from_ms, rows[i - 1].to_ms);
  assert.ok(Math.abs(rows[rows.length - 2].to_ms - 63) < 1e-9);
  assert.deepEqual(scaleOf(rows), { from_ms: 0, to_ms: 100, cut: false });
  const close = falls({
    ...diff,
    request: change('request', 1000, 990),
    causes: [change('own_decode', 500, 490)],
    workload: change('workload', 0, 0),
  });
  assert.ok(scaleOf(close).from_ms > 900, 'small changes of a long request can be seen');
});

test('sides stand in the address', () => {
  const sides = { a: { text: 'previous', file: null }, b: { text: '', file: 'x.duckdb' } };
  const back = readSides(new URLSearchParams(writeSides(sides)));
  assert.deepEqual({ a: { ...back.a }, b: { ...back.b } }, sides);
  assert.deepEqual(bodyOfSides(sides), { a: 'previous', b_file: 'x.duckdb' });
});
