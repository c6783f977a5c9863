// Owns: what the traffic generator's schedule must do: the rate asked for, the same day from the
// same seed, bursts when they are due, bounds. Run by: node --test.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { LIMITS, PRESETS, Schedule, bodiesOf, checked, promptOf, random } from '../try/schedule.js';

const settings = { rate: 5, prompt: 100, output: 50, burst: 1, every: 0, long: 0 };

function day(given, seed, seconds = 200, most = 1e9) {
  const schedule = new Schedule(given, seed),
    all = [];
  let skipped = 0;
  for (let i = 0; i < seconds * 10; i++) {
    const found = schedule.advance(0.1, most);
    all.push(...found.due);
    skipped += found.skipped;
  }
  return { all, skipped };
}

test('arrivals come at the rate, with lengths around their medians', () => {
  const { all } = day(settings, 3, 1000);
  assert.ok(Math.abs(all.length / 5000 - 1) < 0.06, `${all.length} of 5000`);
  const sorted = all.map(({ prompt }) => prompt).sort((a, b) => a - b);
  const median = sorted[Math.floor(sorted.length / 2)];
  assert.ok(Math.abs(median / 100 - 1) < 0.1, `median ${median}`);
  assert.ok(sorted[0] >= 1);
});

test('the same seed is the same day, however time is cut', () => {
  assert.deepEqual(day(settings, 7).all, day(settings, 7).all);
  assert.notDeepEqual(day(settings, 7).all, day(settings, 8).all);
  const whole = new Schedule(settings, 7).advance(20, 1e9).due;
  assert.deepEqual(whole, day(settings, 7, 20).all);
});

test('a rate of nothing sends only bursts, and a long prompt comes in their place', () => {
  const bursts = day({ ...settings, rate: 0, burst: 12, every: 10 }, 1, 35).all;
  assert.equal(bursts.length, 36);
  const bully = day({ ...settings, rate: 0, every: 10, long: 1500 }, 1, 35).all;
  assert.deepEqual(
    bully.map(({ prompt }) => prompt),
    [1500, 1500, 1500],
  );
  assert.deepEqual(day({ ...settings, rate: 0 }, 1).all, []);
});

test('what is beyond the bound is counted, not kept', () => {
  const { due, skipped } = new Schedule({ ...settings, rate: 200 }, 1).advance(10, 64);
  assert.equal(due.length, 64);
  assert.ok(skipped > 1500);
});

test('settings out of their limits are named and cut', () => {
  assert.deepEqual(checked(settings).wrong, []);
  const { settings: cut, wrong } = checked({ ...settings, rate: 9e9, prompt: '', output: 'x' });
  assert.deepEqual(wrong, ['rate', 'prompt', 'output']);
  assert.equal(cut.rate, LIMITS.rate.max);
  assert.equal(cut.output, 1);
  for (const preset of Object.values(PRESETS)) assert.deepEqual(checked(preset).wrong, []);
});

test('bodies fit the context, and prompts have the words they were asked for', () => {
  const next = random(1);
  assert.equal(promptOf(40, next).split(' ').length, 40);
  const run = { model: 'tiny', model_len_max: 64 };
  for (const body of bodiesOf([{ prompt: 5000, output: 5000 }], run, next)) {
    assert.equal(body.max_tokens, 32);
    assert.ok(body.prompt.split(' ').length <= 32);
  }
});
