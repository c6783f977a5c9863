// Owns: how one request's lane is drawn from the columns of an explanation (`lane`), in the score's
// own alphabet, and what its span at an instant is. Called by: picture.js. Pure drawing; the lane
// of a neighbour is drawn on the same axis, shifted by when each was received.

import { KIND, STOPS } from '../score/kinds.js';
import { body, mark } from '../score/marks.js';

const WORK = Object.freeze({
  own_prefill: KIND.PREFILL,
  own_decode: KIND.DECODE,
  recompute: KIND.RECOMPUTE,
  step_boundary: KIND.NEXT,
  passed_over: KIND.PASSED,
  batch_held: KIND.HELD,
});

// {kind, amount} in the score's alphabet, or null: nothing is drawn of it but a hole or a line.
export function markOf(cause) {
  if (cause in WORK) return { kind: WORK[cause], amount: 0 };
  if (cause.startsWith('queue_')) {
    return { kind: KIND.WAIT, amount: STOPS.indexOf(cause.slice('queue_'.length)) };
  }
  if (cause.startsWith('preempted_')) return { kind: KIND.PREEMPTED, amount: 0 };
  return null;
}

// Index of the span that holds an instant, or of the last one that begins before it; -1 of none.
export function spanAt(lane, ms) {
  let low = 0,
    high = lane.begin_ms.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.begin_ms[middle] <= ms) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// Draws the spans in sight. `shift_ms` is added to the lane's instants.
export function drawLane(ctx, c, lane, { scale, y, h, shift_ms = 0 }) {
  const first = Math.max(0, spanAt(lane, scale.from_ms - shift_ms));
  for (let i = first; i < lane.begin_ms.length; i++) {
    const begin_ms = lane.begin_ms[i] + shift_ms;
    if (begin_ms > scale.to_ms) return;
    const x0 = scale.x(begin_ms),
      x1 = scale.x(lane.end_ms[i] + shift_ms);
    const found = markOf(lane.kind[i]);
    if (found) body(ctx, c, found.kind, { x0, x1, y, h }, found.amount);
    else if (lane.kind[i] === 'unexplained') hole(ctx, c, { x0, x1, y, h });
    else {
      ctx.fillStyle = c.line;
      ctx.fillRect(x0, y + h / 2, x1 - x0, 1);
    }
  }
}

function hole(ctx, c, { x0, x1, y, h }) {
  ctx.globalAlpha = 0.5;
  ctx.fillStyle = c.pattern.lost;
  ctx.fillRect(x0, y, x1 - x0, h);
  ctx.globalAlpha = 1;
}

const EVENT_MARKS = Object.freeze({
  arrived: KIND.ARRIVE,
  first_token: KIND.FIRST,
  preempted: KIND.PREEMPT,
  cancel_requested: KIND.CANCEL,
});

// The instants of a life over its lane: [[kind, ms], ...] in drawing order.
export function marksOf({ timeline, finish }) {
  const found = [];
  for (const event of timeline) {
    if (/admitted/.test(event.event) && event.cached_tokens > 0) {
      found.push([KIND.HIT, event.at_ms]);
    }
    const kind = EVENT_MARKS[event.event];
    if (kind !== undefined) found.push([kind, event.at_ms]);
    if (event.event === 'decided' && finish !== 'cancelled') {
      found.push([finish === 'error' ? KIND.ERROR : KIND.FINISH, event.at_ms]);
    }
  }
  return found;
}

export function drawMarks(ctx, c, body, { scale, y, h }) {
  for (const [kind, at_ms] of marksOf(body)) {
    const x = scale.x(at_ms);
    mark(ctx, c, kind, { x0: x, x1: x, y, h, at: x });
  }
}
