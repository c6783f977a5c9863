// Owns: what the page knows of one sequence, and how its life is summed up in spans. Called by:
// store.js, the only writer, and the views that name or measure a request. Pure: no pixels.
// A request seen in a batch before its start was published is provisional (`start` is null).

import { KIND, STOPS } from './kinds.js';

const SPANS_MAX = 64; // kept a request; the oldest go first
const NAME_MAX = 12; // longer ids do not fit a lane's gutter: the record's integer stands for them

export function newRequest(id) {
  return {
    id,
    name: '#' + id,
    start: null,
    end: null,
    arrived_at_ns: 0,
    prompt_tokens: Infinity,
    state: 'waiting', // waiting, running, preempted, finished, unseen
    lane: -1,
    computed: 0,
    highest: 0, // positions below it were computed before: again is recompute
    output: 0,
    cached: 0,
    blocks: 0,
    recomputed: 0,
    preemptions: 0,
    reason: null,
    first_token_ns: 0,
    last_token_ns: 0,
    gap_ns: 0,
    gaps: 0,
    spans: [],
    waits: new Map(), // why it stood still -> ns
    stopsAt: null, // waiting without a lane: the store's sums of time by stop when that began
    waitAs: null, // and the reason it has of its own, when it was preempted
    arrivalShown: false,
    finishing: false,
    seen: -1, // index of the last iteration it had tokens in
  };
}

export function setStart(r, start) {
  r.start = start;
  r.arrived_at_ns = start.arrived_at_ns;
  r.prompt_tokens = start.prompt_tokens;
  if (start.request_id.length <= NAME_MAX) r.name = start.request_id;
}

// What it had been through before the records begin: it was computed up to a position, lost that,
// and may still stand preempted for a cause. What it computes below that position is recompute.
export function recall(r, { computed, preemptions, cause }) {
  if (!r) return;
  r.highest = Math.max(r.highest, computed);
  r.output = Math.max(r.output, computed - r.prompt_tokens + 1, 0);
  r.preemptions = Math.max(r.preemptions, preemptions);
  if (!cause || r.state !== 'waiting') return;
  r.state = 'preempted';
  r.reason = 'preempted_' + cause;
}

// Adjoining tiles of one kind and reason are one span.
export function addSpan(r, kind, detail, tile) {
  const family = kind === KIND.BEHIND ? KIND.WAIT : kind;
  const from_ns = Math.max(tile.begin_at_ns, r.arrived_at_ns);
  const ns = tile.end_at_ns - from_ns;
  if (detail && ns > 0) r.waits.set(detail, (r.waits.get(detail) || 0) + ns);
  const last = r.spans[r.spans.length - 1];
  if (last && last.family === family && last.detail === detail && !tile.hole) {
    last.to_ns = tile.end_at_ns;
    last.tokens += tile.tokens;
    last.steps++;
    return;
  }
  r.spans.push({ family, detail, tokens: tile.tokens, steps: 1, from_ns, to_ns: tile.end_at_ns });
  if (r.spans.length > SPANS_MAX) r.spans.shift();
}

// Time stood still without a lane is read from sums, at its begin and at its end: O(1) a request
// however many wait. `stop_ns` is time by admission stop since the page opened.
export function startWait(r, stop_ns, waitAs = null) {
  r.stopsAt = Float64Array.from(stop_ns);
  r.waitAs = waitAs;
}

export function endWait(r, stop_ns) {
  if (!r.stopsAt) return;
  stop_ns.forEach((ns, stop) => {
    const waited_ns = ns - r.stopsAt[stop],
      why = r.waitAs ?? (stop === 0 ? null : STOPS[stop]);
    if (waited_ns > 0 && why) r.waits.set(why, (r.waits.get(why) || 0) + waited_ns);
  });
  r.stopsAt = r.waitAs = null;
}

// Mean time an output token took after the first, in ms; null with fewer than two.
export const meanGapMs = (r) => (r.gaps ? r.gap_ns / r.gaps / 1e6 : null);

// From arrival to first token in ns; once it has ended, from when the server had read the request.
// Null before the first token.
export function firstTokenNs({ end, first_token_ns, arrived_at_ns }) {
  if (end) {
    return end.first_token_at_ns === null ? null : end.first_token_at_ns - end.received_at_ns;
  }
  return first_token_ns ? first_token_ns - arrived_at_ns : null;
}

export function objectives(start) {
  if (!start || !start.slo) return null;
  try {
    return JSON.parse(start.slo);
  } catch {
    return null;
  }
}
