// Owns: what the small parts must do: columns and seconds within their bounds, scales, words, and
// reading an answer's stream. Run by: node --test dashboard/tests/*.test.js.
// Everything here is the page's own code; streams are real ReadableStreams.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { Columns } from '../score/columns.js';
import { burst, complete, errorWords, readEvents } from '../try/completion.js';
import { duration, int } from '../format.js';
import { STOPS } from '../score/kinds.js';
import { Seconds } from '../score/seconds.js';
import { Scale } from '../score/strips.js';
import { Mine, isLoopback } from '../try/box.js';
import { View } from '../score/view.js';
import { iteration, run } from './support/records.js';

const append = (columns, step) => columns.append(iteration(step), STOPS.indexOf('no_waiting'));

test('columns keep the newest iterations, and only those whose ops are whole', () => {
  const columns = new Columns(8, 16);
  for (let step = 1; step <= 20; step++) {
    append(columns, step);
    for (let k = 0; k < 3; k++) columns.push(k, 0, step, k);
  }
  assert.equal(columns.count, 20);
  assert.equal(columns.first, 15, 'five iterations of three ops fit sixteen');
  for (let i = columns.first; i < columns.count; i++) {
    assert.equal(columns.step[columns.slot(i)], i + 1);
    for (let k = 0; k < 3; k++) {
      assert.equal(columns.opRequest[columns.op(i, k)], i + 1);
      assert.equal(columns.opAmount[columns.op(i, k)], k);
    }
  }
});

test('an instant is found in the tile that holds it', () => {
  const columns = new Columns(8, 16);
  for (let step = 1; step <= 12; step++) append(columns, step);
  assert.equal(columns.step[columns.slot(columns.find(95e6))], 10);
  assert.equal(columns.find(0), columns.first);
  assert.equal(columns.find(1e12), columns.last);
});

test('quantiles are within two percent, and an empty second is not the one before it', () => {
  const seconds = new Seconds();
  const exact = [];
  for (let i = 0; i < 1000; i++) {
    const ms = 2 * Math.exp(i / 150);
    exact.push(ms);
    seconds.addGap(seconds.slot((i % 5) * 1e9), ms * 1e6);
  }
  for (const q of [0.5, 0.95]) {
    const ours = seconds.quantile('gap', q, 0, 5),
      true_ms = exact[Math.ceil(q * 1000) - 1];
    assert.ok(Math.abs(ours / true_ms - 1) < 0.02, `${q}: ${ours} against ${true_ms}`);
  }
  assert.equal(seconds.quantile('gap', 0.5, 5, 9), null);
  seconds.slot(512e9); // the same slot as second 0, a window later
  assert.equal(seconds.of(0), -1);
  assert.equal(seconds.quantile('gap', 0.5, 512, 513), null);
});

test('a scale grows at once and shrinks with patience', () => {
  const scale = new Scale([16, 64, 256]);
  assert.equal(scale.fit(20, 0), true);
  assert.equal(scale.full, 64);
  assert.equal(scale.fit(10, 1000), false);
  assert.equal(scale.fit(10, 2900), false);
  assert.equal(scale.fit(10, 3100), true);
  assert.equal(scale.full, 16);
  scale.fit(9999, 4000);
  assert.equal(scale.full, 256, 'the last rung; what is over it is marked');
});

test('the window maps instants to pixels and back, and zooms at a point', () => {
  const view = new View();
  view.right = 100e9;
  assert.ok(Math.abs(view.ns(view.x(97.5e9)) - 97.5e9) < 1);
  view.follow = false;
  const before = view.ns(300);
  view.zoom(1.25, 300);
  assert.ok(Math.abs(view.ns(300) - before) < 1e3);
});

test('figures are read at a glance and unknown ones are dashes', () => {
  assert.deepEqual(
    [0.42, 9.96, 51.2, 999, 3148, 12345, 75e3, null].map(duration),
    ['0.4 ms', '10.0 ms', '51 ms', '999 ms', '3.15 s', '12.3 s', '1 min 15 s', '–'],
  );
  assert.equal(int(undefined), '–');
});

const stream = (...chunks) => {
  const bytes = chunks.map((chunk) => new TextEncoder().encode(chunk));
  return new ReadableStream({
    start(controller) {
      for (const chunk of bytes) controller.enqueue(chunk);
      controller.close();
    },
  });
};

test('events are read whole however the network cut them', async () => {
  const out = [];
  for await (const data of readEvents(stream('data: {"a"', ':1}\n\nda', 'ta: [DONE]\r\n\r\n'))) {
    out.push(data);
  }
  assert.deepEqual(out, ['{"a":1}', '[DONE]']);
});

const answer = (body, status = 200) => async () =>
  new Response(body, { status, headers: { 'x-iterscope-request-id': 'chatcmpl-1' } });
const chunk = (choice) => `data: ${JSON.stringify({ choices: [{ index: 0, ...choice }] })}\n\n`;

async function ask(send) {
  const text = [];
  let id = null;
  const result = await complete({
    url: 'http://x/',
    body: {},
    onStart: (requestId) => (id = requestId),
    onText: (piece) => text.push(piece),
    send,
  });
  return { text: text.join(''), id, ...result };
}

test('an answer arrives with its request id and its finish', async () => {
  const body =
    chunk({ delta: { role: 'assistant', content: '' } }) +
    chunk({ delta: { content: 'Hé' } }) +
    chunk({ delta: { content: 'llo' }, finish_reason: 'stop' }) +
    'data: [DONE]\n\n';
  const got = await ask(answer(body));
  assert.deepEqual(got, { text: 'Héllo', id: 'chatcmpl-1', finish: ['stop'] });
});

test('every way to fail comes out in words', async () => {
  const error = JSON.stringify({ error: { message: 'too long' } });
  await assert.rejects(ask(answer(error, 400)), /too long/);
  await assert.rejects(ask(answer(`data: ${error}\n\n`)), /too long/);
  await assert.rejects(ask(answer(chunk({ delta: { content: 'a' } }))), /lost before/);
  assert.equal(errorWords(502, '<html>'), 'The server answered 502.');
});

test('a burst fits the model, however small', () => {
  for (const model_len_max of [64, 512, 8192]) {
    const bodies = burst(run({ model_len_max }));
    assert.equal(bodies.flatMap((body) => body.prompt).length, 16);
    assert.equal(new Set(bodies.flatMap((body) => body.prompt)).size, 16);
    for (const { prompt, max_tokens } of bodies) {
      for (const text of prompt) assert.ok(text.length + max_tokens < model_len_max);
    }
  }
});

test('prompts are sent from the machine itself only', () => {
  for (const host of ['localhost', '127.0.0.1', '127.8.0.1', '[::1]']) assert.ok(isLoopback(host));
  for (const host of ['10.0.0.7', 'example.org', '127.0.0.1.example.org', 'localhost.evil']) {
    assert.ok(!isLoopback(host), host);
  }
});

test('the page knows its own requests, also as parts of one with several sequences', () => {
  const mine = new Mine();
  for (let i = 0; i < 100; i++) mine.add(`id-${i}`);
  assert.ok(mine.ids.size <= 64);
  assert.ok(mine.has({ start: { request_id: 'id-99', parent_id: null } }));
  assert.ok(mine.has({ start: { request_id: 'x', parent_id: 'id-98' } }));
  assert.ok(!mine.has({ start: { request_id: 'id-0', parent_id: null } }));
  assert.ok(!mine.has({ start: null }));
});
