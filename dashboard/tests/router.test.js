// Owns: what addresses and errors must do: a view is a link that reads back, and a failed question
// says why. Run by: node --test.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { ApiError, ask, errorOf, urlOf } from '../api.js';
import { addressOf, parse } from '../router.js';

test('an address reads back', () => {
  for (const [name, params] of [
    ['live', {}],
    ['request', { id: 'cmpl-1/2?x=#&%' }],
    ['post-mortem', { from: '2026-11-30T06:00:00Z', q: 'a b&c' }],
    ['request', { id: 'req-7', zoom: '2' }],
  ]) {
    assert.deepEqual(parse(addressOf(name, params)), { name, params });
  }
  assert.equal(addressOf('compare', { a: null, b: undefined, c: 0 }), '#/compare?c=0');
});

test('what is no address is none', () => {
  for (const hash of ['', '#', '#t=5', '#/', '#/UPPER', '#/request/%E0%A4%A', 'live']) {
    assert.equal(parse(hash), null, hash);
  }
});

const answering = (status, text) => async () => new Response(text, { status });

test('an answer is its JSON; an error has status, code and a sentence', async () => {
  const good = answering(200, '{"a": 1}');
  assert.deepEqual(await ask('GET', 'x', undefined, { send: good }), { a: 1 });
  const refused = answering(404, '{"error": {"message": "no such thing", "code": "gone"}}');
  await assert.rejects(ask('GET', 'x', undefined, { send: refused }), {
    name: 'Error',
    message: 'no such thing',
    status: 404,
    code: 'gone',
  });
  await assert.rejects(ask('GET', 'x', undefined, { send: answering(200, '{"cut') }), ApiError);
  const down = async () => {
    throw new TypeError('Failed to fetch');
  };
  await assert.rejects(ask('GET', 'x', undefined, { send: down }), { status: 0 });
  assert.equal(errorOf(502, '<html>').message, 'The server answered 502.');
  assert.ok(urlOf('v1/requests').endsWith('/v1/requests'));
});

test('a body is sent as JSON', async () => {
  let sent = null;
  const send = async (url, options) => {
    sent = options;
    return new Response('{}');
  };
  await ask('POST', 'x', { a: 1 }, { send });
  assert.equal(sent.body, '{"a":1}');
  assert.equal(sent.headers['content-type'], 'application/json');
  await ask('GET', 'x', undefined, { send });
  assert.equal(sent.body, undefined);
});
