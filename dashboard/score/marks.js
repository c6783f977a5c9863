// Owns: the alphabet of the score: each kind has a shape, a colour and a sentence, and legend and
// lanes both draw through here, so they can never disagree. Called by: lanes.js, strips.js,
// legend.js. Cool hues are work, warm hues are waiting or waste; shape says which. Pure drawing.

import { KIND, STOPS, isMark } from './kinds.js';

const stopOf = (name) => STOPS.indexOf(name);

// kind, name, sentence, amount (of a wait: its stop)
export const LEGEND = [
  [KIND.PREFILL, 'prefill', 'A chunk of a prompt is being read.', 0],
  [KIND.DECODE, 'decode', 'One token an iteration; each tick is a token.', 0],
  [KIND.WAIT, 'waits: KV', 'Not admitted: too few free KV blocks.', stopOf('kv')],
  [KIND.WAIT, 'rows', 'Not admitted: every batch row is taken.', stopOf('seqs')],
  [KIND.WAIT, 'budget', 'Not admitted: the step’s token budget is spent.', stopOf('budget')],
  [KIND.PREEMPTED, 'preempted', 'Lost its KV blocks to another request; waits to return.', 0],
  [KIND.RECOMPUTE, 'recompute', 'Computes again what it lost.', 0],
  [KIND.HELD, 'batch held', 'Finished, but a fixed batch keeps the row.', 0],
];
export const LEGEND_MARKS = [
  [KIND.HIT, 'prefix hit', 'Part of the prompt was in the prefix cache.'],
  [KIND.FIRST, 'first token', 'Its first token was committed.'],
  [KIND.FINISH, 'finish', 'Left the batch; its blocks are free.'],
  [KIND.CANCEL, 'cancel', 'Cancelled, or ended by an error.'],
];

function waitPattern(c, stop) {
  const name = STOPS[stop];
  return name === 'kv' ? c.pattern.kv : name === 'seqs' ? c.pattern.seqs : c.pattern.wait;
}

// The body of one lane in one tile of time.
export function body(ctx, c, kind, { x0, x1, y, h }, amount) {
  const w = Math.max(x1 - x0, 1 / c.ratio);
  if (kind === KIND.PREFILL || kind === KIND.RECOMPUTE) {
    ctx.fillStyle = kind === KIND.PREFILL ? c.prefill : c.pattern.recompute;
    ctx.fillRect(x0, y, w > 5 ? w - 1 : w, h);
  } else if (kind === KIND.DECODE) {
    decodeLine(ctx, c, { x0, w, y, h });
    decodeTick(ctx, c, { x1, w, y, h });
  } else if (kind === KIND.PREEMPTED) {
    if (h >= 7) {
      ctx.fillStyle = c.pattern.preempted;
      ctx.fillRect(x0, y, w, h);
    }
    rails(ctx, c.preempted, { x0, w, y, h });
  } else if (kind === KIND.HELD) {
    rails(ctx, c.held, { x0, w, y, h });
  } else if (kind === KIND.PASSED) {
    ctx.fillStyle = c.wait;
    ctx.fillRect(x0, y + h / 2 - 0.5, w, 1);
  } else wait(ctx, c, kind, { x0, w, y, h }, amount);
}

function decodeLine(ctx, c, { x0, w, y, h }) {
  const line = Math.max(Math.min(1, h), Math.round(h * 0.22));
  ctx.fillStyle = c.decodeLine;
  ctx.fillRect(x0, y + Math.round((h - line) / 2), w, line);
}

function decodeTick(ctx, c, { x1, w, y, h }) {
  const tick = w > 12 ? 2.5 : w > 5 ? 2 : w > 2.4 ? 1 : 0.5;
  ctx.fillStyle = c.decode;
  ctx.fillRect(x1 - tick, y + h * 0.1, tick, h * 0.8);
}

function rails(ctx, colour, { x0, w, y, h }) {
  ctx.fillStyle = colour;
  ctx.fillRect(x0, y, w, 1);
  ctx.fillRect(x0, y + h - 1, w, 1);
}

// The blocker waits at full height; those behind it on a low rail, so the eye finds the cause.
function wait(ctx, c, kind, { x0, w, y, h }, stop) {
  const next = kind === KIND.NEXT,
    blocker = kind === KIND.WAIT;
  ctx.fillStyle = next ? c.faint : stop === stopOf('kv') ? c.kv : c.wait;
  const rail = Math.min(h, blocker ? 2 : 1);
  ctx.fillRect(x0, y + h - rail, w, rail);
  if (next) return;
  const tall = blocker ? h : Math.max(2, Math.round(h * 0.45));
  ctx.globalAlpha = blocker ? 1 : 0.7;
  ctx.fillStyle = waitPattern(c, stop);
  ctx.fillRect(x0, y + h - tall, w, tall - rail);
  ctx.globalAlpha = 1;
}

function polygon(ctx, points) {
  ctx.beginPath();
  points.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.closePath();
  ctx.fill();
}

const diamond = (x, y, r) => [
  [x, y - r],
  [x + r, y],
  [x, y + r],
  [x - r, y],
];

const MARK = {
  [KIND.ARRIVE](ctx, c, { at, y, h }) {
    ctx.fillStyle = c.text;
    ctx.fillRect(at, y, 1.5, h);
  },
  [KIND.HIT](ctx, c, { x0, middle, r }) {
    ctx.strokeStyle = c.prefill;
    ctx.lineWidth = 1.6;
    ctx.beginPath();
    for (const shift of [0, r]) {
      ctx.moveTo(x0 - 2 * r - 1 + shift, middle - r);
      ctx.lineTo(x0 - r - 1 + shift, middle);
      ctx.lineTo(x0 - 2 * r - 1 + shift, middle + r);
    }
    ctx.stroke();
  },
  [KIND.FIRST](ctx, c, { x1, middle, r }) {
    ctx.fillStyle = c.bg;
    polygon(ctx, diamond(x1, middle, r + 2));
    ctx.fillStyle = c.text;
    polygon(ctx, diamond(x1, middle, r));
  },
  [KIND.FINISH](ctx, c, { x1, y, h }) {
    ctx.fillStyle = c.text;
    ctx.fillRect(x1 - 1, y, Math.max(2.5, h * 0.25), h);
  },
  [KIND.CANCEL](ctx, c, { x1, middle, r }) {
    const s = Math.max(2.5, r);
    ctx.strokeStyle = c.bad;
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.moveTo(x1 - s + 3, middle - s);
    ctx.lineTo(x1 + s + 3, middle + s);
    ctx.moveTo(x1 - s + 3, middle + s);
    ctx.lineTo(x1 + s + 3, middle - s);
    ctx.stroke();
  },
  [KIND.PREEMPT](ctx, c, { x0, y, h, r }) {
    ctx.fillStyle = c.preempted;
    polygon(ctx, [
      [x0 - r, y],
      [x0 + r, y],
      [x0, y + Math.min(h, r * 1.8)],
    ]);
    ctx.fillRect(x0 - 0.75, y, 1.5, h);
  },
};
MARK[KIND.ERROR] = MARK[KIND.CANCEL];

// A mark: an instant in a lane, drawn over the body. `at` is the instant when it has its own.
export function mark(ctx, c, kind, { x0, x1, y, h, at = x0 }) {
  const place = { x0, x1, y, h, at, middle: y + h / 2, r: Math.min(5, h * 0.42) };
  MARK[kind](ctx, c, place);
}

const bodyHeight = (lane) => lane - (lane >= 9 ? 3 : lane >= 6 ? 2 : lane >= 3 ? 1 : 0.3);

// One iteration over all lanes: decodes first, a colour at a time since they are many, then the
// other bodies, then marks.
export function paintColumn(ctx, c, columns, index, { x0, x1, height, laneHeight, at }) {
  const h = bodyHeight(laneHeight),
    w = Math.max(x1 - x0, 1 / c.ratio);
  if (columns.hole[columns.slot(index)]) hole(ctx, c, columns, index, { x0, height, at });
  if (x1 - x0 >= 14) {
    ctx.fillStyle = c.line;
    ctx.fillRect(x1 - 1 / c.ratio, 0, 1 / c.ratio, height);
  }
  const count = columns.ops(index);
  for (const draw of [decodeLine, decodeTick]) {
    for (let k = 0; k < count; k++) {
      const op = columns.op(index, k);
      if (columns.opKind[op] !== KIND.DECODE || columns.opLane[op] < 0) continue;
      draw(ctx, c, { x0, x1, w, y: columns.opLane[op] * laneHeight + 1, h });
    }
  }
  for (let k = 0; k < count; k++) {
    const op = columns.op(index, k),
      kind = columns.opKind[op];
    if (kind === KIND.DECODE || isMark(kind) || columns.opLane[op] < 0) continue;
    const y = columns.opLane[op] * laneHeight + 1;
    body(ctx, c, kind, { x0, x1, y, h }, columns.opAmount[op]);
  }
  paintMarks(ctx, c, columns, index, { x0, x1, laneHeight, at });
}

export function paintMarks(ctx, c, columns, index, { x0, x1, laneHeight, at }, from = 0) {
  const h = bodyHeight(laneHeight),
    count = columns.ops(index);
  for (let k = from; k < count; k++) {
    const op = columns.op(index, k),
      kind = columns.opKind[op];
    if (!isMark(kind) || columns.opLane[op] < 0) continue;
    const y = columns.opLane[op] * laneHeight + 1;
    const own = kind === KIND.ARRIVE;
    const begin_ns = columns.begin_at_ns[columns.slot(index)];
    const x = own ? at(begin_ns + columns.opAmount[op] * 1e3) : x0;
    mark(ctx, c, kind, { x0, x1, y, h, at: x });
  }
}

// Lost records leave a hatched hole, never a guess. `at` maps an instant to px.
export function hole(ctx, c, columns, index, { x0, height, at }) {
  if (!columns.has(index - 1)) return;
  const from = at(columns.end_at_ns[columns.slot(index - 1)]);
  ctx.globalAlpha = 0.35;
  ctx.fillStyle = c.pattern.lost;
  ctx.fillRect(from, 0, x0 - from, height);
  ctx.globalAlpha = 1;
}
