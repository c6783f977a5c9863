// Owns: the words of the closed causes, and the sentence that sums an explanation up. Called by:
// waterfall.js, gaps.js and parts.js. Pure; SCHEMA.md says what each cause means, this how it
// reads in a sentence. A cause it does not know is shown by its own name, never left out.

import { duration } from '../format.js';

const PHRASE = Object.freeze({
  tokenize: 'reading and tokenizing it',
  step_boundary: 'until the next step began',
  queue_batch_closed: 'waiting for the batch to leave',
  queue_seqs: 'waiting for a free row',
  queue_budget: 'waiting for token budget',
  queue_prefill_cap: 'waiting for the prefill cap',
  queue_dependency: 'waiting for what it depends on',
  queue_slo: 'waiting for the sake of others’ SLO',
  queue_kv: 'waiting for KV blocks',
  queue_policy: 'waiting for a quota',
  own_prefill: 'its own prefill',
  own_decode: 'its own decode',
  neighbour_prefill: 'neighbours’ prefill',
  neighbour_decode: 'neighbours’ decode',
  recompute: 'computing again what preemption took',
  preempted_kv: 'preempted for KV blocks',
  preempted_policy: 'preempted by the policy',
  passed_over: 'passed over',
  batch_held: 'held by its batch',
  scheduler: 'the host between device work',
  padding: 'padding',
  output: 'writing the answer',
  client_stall: 'waiting for the client to read',
  unexplained: 'unexplained, records were lost',
});

export const phrase = (cause) => PHRASE[cause] ?? cause.replaceAll('_', ' ');

// How the requests behind a cause stand to it.
export function relation(cause) {
  if (cause.startsWith('queue_')) return 'behind';
  return cause.startsWith('preempted_') ? 'for' : 'mostly';
}

// "1.24 s in all: 610 ms its own decode, 402 ms neighbours' prefill, 90 ms waiting for a free row."
export function sentence({ e2e_ms, causes, state }) {
  const worst = [...causes].sort((a, b) => b.ms - a.ms).slice(0, 3);
  const words = worst.map(({ cause, ms }) => `${duration(ms)} ${phrase(cause)}`).join(', ');
  const whole = `${duration(e2e_ms)} ${state === 'finished' ? 'in all' : 'so far'}`;
  return { whole, words: words ? `: ${words}.` : '.' };
}
