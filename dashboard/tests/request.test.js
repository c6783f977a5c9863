// Owns: what the Request view's models must do: a waterfall that loses no time, gaps named as the
// record has them, a scale that keeps the pointer's instant. Run by: node --test.
// The answers used here have the shape of GET /v1/requests/{id}.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { phrase, relation, sentence } from '../request/causes.js';
import { gapKind, gapStrip, gapWords, objective, quantile } from '../request/gaps.js';
import { TimeScale } from '../request/scale.js';
import { falls, neighbours } from '../request/waterfall.js';

const part = (cause, ms, ...requests) => ({
  cause,
  ms,
  requests: requests.map(([request_id, tokens, its_ms]) => ({ request_id, tokens, ms: its_ms })),
});
const body = {
  request_id: 'req-1',
  e2e_ms: 1000,
  state: 'finished',
  causes: [
    part('tokenize', 0.5),
    part('queue_kv', 200, ['req-1', 0, 50], ['req-2', 0, 150]),
    part('own_decode', 500),
    part('neighbour_prefill', 299, ['req-7', 512, 280], ['req-8', 40, 10], ['req-9', 30, 9]),
    part('padding', 0.5),
  ],
};

test('a waterfall loses no time: bars adjoin, and the short ones are one', () => {
  const rows = falls(body);
  assert.deepEqual(
    rows.map(({ cause }) => cause),
    ['queue_kv', 'own_decode', 'neighbour_prefill', null],
  );
  let at = 0;
  for (const { left, share } of rows) {
    assert.ok(Math.abs(left - at) < 1e-9);
    at = left + share;
  }
  assert.ok(Math.abs(at - 1) < 1e-9);
  assert.equal(rows.at(-1).count, 2);
  assert.deepEqual(
    rows[2].who.map(({ request_id }) => request_id),
    ['req-7', 'req-8'],
  );
  assert.equal(rows[2].others, 1);
});

test('an answer without any time is drawn as nothing', () => {
  assert.deepEqual(falls({ causes: [], e2e_ms: 0 }), []);
  assert.equal(sentence({ causes: [], e2e_ms: 0, state: 'waiting' }).words, '.');
});

test('neighbours are summed over causes, the worst first, never the request itself', () => {
  const found = neighbours(body, 2);
  assert.deepEqual(
    found.map(({ request_id, ms }) => [request_id, ms]),
    [
      ['req-7', 280],
      ['req-2', 150],
    ],
  );
});

test('the sentence says whole and worst', () => {
  const { whole, words } = sentence(body);
  assert.equal(whole, '1.00 s in all');
  assert.equal(
    words,
    ': 500 ms its own decode, 299 ms neighbours’ prefill, 200 ms waiting for KV blocks.',
  );
  assert.equal(sentence({ ...body, state: 'running' }).whole, '1.00 s so far');
  assert.equal(phrase('a_new_cause'), 'a new cause');
  assert.equal(relation('queue_seqs'), 'behind');
  assert.equal(relation('preempted_kv'), 'for');
});

const gap = (ms, at_ms, ...causes) => ({ token: 2, ms, at_ms, causes });

test('a slow gap is named in the words of its worst foreign cause', () => {
  const slow = gap(41, 100, part('own_decode', 8), {
    ...part('neighbour_prefill', 33, ['req-7', 512, 33]),
  });
  assert.equal(gapWords(slow), '41 ms: neighbour req-7’s prefill, 512 tokens');
  assert.equal(gapWords(slow, () => '#7'), '41 ms: neighbour #7’s prefill, 512 tokens');
  const preempted = gap(900, 2000, part('preempted_kv', 890, ['req-3', 0, 890]));
  assert.equal(gapWords(preempted), '900 ms: preempted for req-3');
  assert.equal(gapWords(gap(9, 9, part('own_decode', 9))), '9.0 ms: its own decode');
  const host = gap(9, 9, { cause: 'scheduler', ms: 9 });
  assert.equal(gapWords(host), `9.0 ms: ${phrase('scheduler')}`);
  const crowd = gap(20, 9, part('neighbour_decode', 15, ['a', 1, 8], ['b', 1, 7]));
  assert.equal(gapWords(crowd), '20 ms: 2 neighbours’ decode');
  const prompts = {
    ...part('neighbour_prefill', 30, ['a', 60, 10], ['b', 60, 10]),
    more: { requests: 2, tokens: 90, ms: 10 },
  };
  assert.equal(gapWords(gap(35, 9, prompts)), '35 ms: 4 neighbours’ prefill, 210 tokens');
});

test('bars have the kind of what took them, and only what stands out is named', () => {
  const gaps = [];
  for (let i = 0; i < 20; i++) gaps.push(gap(10, 10 * i, part('own_decode', 10)));
  gaps.push(gap(40, 300, part('own_decode', 5), part('neighbour_prefill', 35, ['r', 9, 35])));
  gaps.push(gap(14, 320, part('own_decode', 14)));
  const strip = gapStrip({ gaps, slo: '{"ttft_ms": 100, "tpot_ms": 30}' });
  assert.deepEqual(
    strip.named.map(({ ms }) => ms),
    [40],
  );
  assert.equal(strip.bars[20].kind, 'prefill');
  assert.equal(strip.bars[20].over, true);
  assert.equal(strip.bars[0].over, false);
  assert.deepEqual([strip.p50, strip.max, strip.limit_ms], [10, 40, 30]);
  assert.equal(strip.bars[20].from_ms, 260);
  assert.equal(gapKind(gap(9, 9, part('preempted_kv', 9))), 'preempted');
});

test('a request without gaps or with a broken objective has an empty strip', () => {
  const strip = gapStrip({ gaps: [], slo: null });
  assert.deepEqual([strip.bars, strip.named, strip.p50, strip.max], [[], [], null, null]);
  assert.ok(strip.ceiling > 0);
  assert.equal(objective('no json'), null);
  assert.equal(objective(null), null);
  assert.equal(quantile([], 0.5), null);
});

test('the scale keeps the instant under the pointer and never leaves the life', () => {
  const scale = new TimeScale();
  scale.place(100, 800);
  scale.whole(4000);
  assert.equal(scale.x(0), 100);
  assert.equal(scale.x(4000), 900);
  scale.zoom(4, 1000);
  const at = scale.x(1000);
  scale.zoom(2, 1000);
  assert.ok(Math.abs(scale.x(1000) - at) < 1e-6);
  scale.pan(1e9);
  assert.equal(scale.to_ms, 4000);
  scale.pan(-1e9);
  assert.equal(scale.from_ms, 0);
  scale.reveal(3900);
  assert.ok(scale.from_ms <= 3900 && scale.to_ms >= 3900);
  scale.zoom(1e-9);
  assert.equal(scale.zoomed, false);
  assert.deepEqual([scale.from_ms, scale.to_ms], [0, 4000]);
});

test('ticks are round and apart; a zoomed picture stays put while the life grows', () => {
  const scale = new TimeScale();
  scale.place(0, 1000);
  scale.whole(1000);
  assert.deepEqual(scale.ticks(100), [0, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
  scale.zoom(2, 500);
  const before = [scale.from_ms, scale.to_ms];
  scale.grow(2000);
  assert.deepEqual([scale.from_ms, scale.to_ms], before);
  scale.whole(7.3e6);
  assert.ok(scale.ticks(100).length <= 11);
});
