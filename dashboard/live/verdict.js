// Owns: the one sentence that says what the engine is doing now and what is wrong with it, from
// the last two seconds of iterations. Called by: page.js 4 times a second. `diagnose` is pure.
// It never guesses: each branch names the request and the figure it rests on.

import { make, write } from '../dom.js';
import { duration, int, percent, plural, reason } from '../format.js';
import { KIND, STOPS } from '../score/kinds.js';
import { holders } from '../score/kvmap.js';
import { overObjective, slowStep } from './slow.js';

const WINDOW_NS = 2e9;
export const STUCK_NS = 5e9; // live requests and no step for so long
const CALM_MS = 1000; // trouble shows at once; calm must last before it replaces trouble
const GLYPH = { good: '●', warn: '▲', bad: '■', idle: '○' };

// state: {link, silent_ns: since any record, still_ns: without a step though somebody lives}.
// Answers {level, head, body, request?}.
export function diagnose(store, { link, silent_ns, still_ns = 0 }) {
  const { columns } = store;
  if (link === 'disconnected') return unknown(silent_ns);
  if (store.fault) return broken(store.fault);
  if (!store.run) return { level: 'idle', head: 'Starting', body: 'The engine is not ready yet.' };
  if (still_ns > STUCK_NS) return stuck(store, still_ns);
  if (columns.count === columns.first) return idle('No request has come yet.');
  if (!store.live.size) return idle('Nothing runs and nobody waits.');
  const window = survey(store);
  const s = columns.slot(columns.last),
    waiting = columns.waiting[s];
  if (waiting && (window.kvStops > 0.4 || window.preempted)) return full(store, window);
  const heavy = longPrompt(store, window);
  if (heavy) return heavy;
  const stop = STOPS[columns.stop[s]],
    blocker = columns.blocker[s];
  const late = slowStep(store) ?? overObjective(store);
  // Of a late token and a queue, whichever cost somebody more time is said.
  const since_ns = store.requests.get(blocker)?.arrived_at_ns ?? 0;
  const waited_ns = waiting ? columns.newestNs - since_ns : 0;
  if (late?.ns > waited_ns) return late;
  if (waiting && stop === 'seqs') {
    return {
      level: 'warn',
      head: 'Rows are full',
      request: blocker,
      body:
        `all ${int(store.run.seqs_max)} batch rows are taken; ${store.name(blocker)} is first of ` +
        `${int(waiting)} waiting, while ${percent(free(store, s))} of KV is free (--max-num-seqs).`,
    };
  }
  if (waiting > 2) {
    const first = blocker < 0 ? '' : `, first ${store.name(blocker)}`;
    return {
      level: 'warn',
      head: 'A queue is forming',
      request: blocker < 0 ? undefined : blocker,
      body: `${int(waiting)} wait${first}: ${reason(stop)}.`,
    };
  }
  return late ?? healthy(columns, s);
}

const idle = (body) => ({ level: 'idle', head: 'Idle', body });
const free = (store, s) => 1 - store.columns.kv_blocks_used[s] / store.run.kv_blocks_total;

function unknown(silent_ns) {
  return {
    level: 'idle',
    head: 'Unknown',
    body:
      `No record for ${Math.round(silent_ns / 1e9)} s. ` +
      'Everything below is the past; the engine may be well or may be gone.',
  };
}

function broken(fault) {
  return {
    level: 'bad',
    head: 'The engine failed',
    body: `${fault.where}: ${fault.error}. What ran has ended; waiting for an engine to start.`,
  };
}

function stuck(store, still_ns) {
  return {
    level: 'warn',
    head: 'No step has ended',
    body:
      `for ${Math.round(still_ns / 1e9)} s, with ${plural(store.live.size, 'request')} in the ` +
      'engine: a very long step, or it is stuck.',
  };
}

function healthy(columns, s) {
  const prefill = columns.prefill_tokens[s];
  const chunk = prefill ? ` beside ${plural(prefill, 'prompt token')}` : '';
  const rows = columns.rows[s];
  const who = rows === 1 ? '1 request has its step alone' : `${int(rows)} requests share a step`;
  return {
    level: 'good',
    head: 'Healthy',
    body:
      `${who}: ${plural(columns.decode_tokens[s], 'decode')}${chunk}. ` +
      'Nobody waits longer than a step.',
  };
}

// What the last two seconds hold: stops, preemptions, long and short steps, prompt tokens by
// request.
function survey(store) {
  const { columns } = store,
    out = { steps: 0, kvStops: 0, preempted: 0, slow: [0, 0], calm: [0, 0], prompts: new Map() };
  const kv = STOPS.indexOf('kv');
  for (let i = columns.find(columns.newestNs - WINDOW_NS); i < columns.count; i++) {
    const s = columns.slot(i);
    out.steps++;
    out.preempted += columns.preempted[s];
    if (columns.stop[s] === kv) out.kvStops++;
    const heavy = columns.prefill_tokens[s] > columns.token_budget[s] * 0.6;
    const side = heavy ? out.slow : out.calm;
    side[0]++;
    side[1] += columns.tileNs(i);
    for (let k = 0; k < columns.ops(i); k++) {
      const op = columns.op(i, k),
        kind = columns.opKind[op];
      if (kind !== KIND.PREFILL && kind !== KIND.RECOMPUTE) continue;
      const id = columns.opRequest[op];
      out.prompts.set(id, (out.prompts.get(id) || 0) + columns.opAmount[op]);
    }
  }
  out.kvStops /= out.steps || 1;
  return out;
}

function full(store, { preempted }) {
  const { columns, run } = store,
    s = columns.slot(columns.last);
  const blocker = store.requests.get(columns.blocker[s]);
  const [holder] = holders(columns, columns.last).filter(([id]) => id !== null);
  const available = run.kv_blocks_total - columns.kv_blocks_used[s];
  const parts = [];
  if (blocker?.start) {
    const known = blocker.prompt_tokens + blocker.output + 1;
    const need = Math.ceil(known / run.block_tokens);
    const state = available < need ? 'are available' : 'have just come free';
    parts.push(`${blocker.name} needs ${int(need)} blocks, ${int(available)} ${state}`);
    if (columns.waiting[s] > 1) parts.push(`${int(columns.waiting[s] - 1)} wait behind`);
  } else parts.push(`${int(columns.waiting[s])} wait`);
  if (holder) {
    const share = percent(holder[1] / run.kv_blocks_total);
    parts.push(`${store.name(holder[0])} holds ${share}`);
  }
  const lost = preempted ? ` ${plural(preempted, 'preemption')} in 2 s.` : '';
  return {
    level: 'bad',
    head: 'KV is full',
    request: blocker?.id,
    body: parts.join('; ') + '.' + lost,
  };
}

// A prompt whose chunks fill the steps of everyone else.
function longPrompt(store, { slow, calm, prompts }) {
  const { columns } = store;
  const [id, most] = [...prompts].sort((a, b) => b[1] - a[1])[0] || [];
  const r = store.requests.get(id);
  const rows = columns.rows[columns.slot(columns.last)];
  if (!r || !r.start || most < 800 || slow[0] < 3 || rows < 2) return null;
  const mean = ([n, ns]) => (n ? duration(ns / n / 1e6) : '–');
  return {
    level: 'warn',
    head: 'A long prompt is in the way',
    request: id,
    body:
      `${r.name} reads ${int(r.prompt_tokens)} tokens: steps take ${mean(slow)} ` +
      `instead of ${mean(calm)}, for all ${int(rows)} in the batch.`,
  };
}

export class Verdict {
  constructor({ onPick }) {
    this.glyph = make('span', { class: 'v-glyph', 'aria-hidden': 'true' });
    this.head = make('strong', { 'aria-live': 'polite' });
    this.body = make('span', { class: 'v-body' });
    this.button = make('button', {
      class: 'quiet',
      text: 'Show its lane',
      hidden: true,
      onclick: () => onPick(this.request),
    });
    this.element = make('div', { class: 'verdict' }, this.glyph, this.head, this.body, this.button);
  }

  update(store, state, now_ms) {
    const v = this.steady(diagnose(store, state), now_ms);
    this.request = v.request;
    this.element.dataset.level = v.level;
    write(this.glyph, GLYPH[v.level]);
    write(this.head, v.head);
    write(this.body, v.body);
    this.body.title = v.body;
    this.button.hidden = v.request === undefined;
  }

  steady(v, now_ms) {
    if (v.level === 'warn' || v.level === 'bad') {
      this.trouble = { v, now_ms };
      return v;
    }
    const fresh = v.level === 'good' && this.trouble && now_ms - this.trouble.now_ms < CALM_MS;
    return fresh ? this.trouble.v : v;
  }
}
