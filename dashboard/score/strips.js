// Owns: how the three strips under the score draw a column (the batch in rows and tokens, the step
// in time, the KV pool in blocks) and the full scales of the first two, which follow what is in
// view. Called by: bands.js through Track. Pure drawing; a scale changes only in `fit`.

import { STOPS } from './kinds.js';
import { hole } from './marks.js';

const KV = STOPS.indexOf('kv');
const TOP = 3; // px kept free above a full bar
const PATIENCE_MS = 3000;
const STEP_PARTS = ['device_ns', 'launch_ns', 'plan_ns', 'commit_ns'];

// The full scale of a strip: the least rung that holds the highest bar in view. It grows at once
// and shrinks after a while, so that the picture does not breathe.
export class Scale {
  constructor(rungs) {
    this.rungs = rungs;
    this.full = rungs[0];
    this.roomySince = 0;
  }

  // True when the scale changed and the strip must be drawn again. `cap` is the highest a bar can
  // rightly be, where there is such a bound.
  fit(highest, now_ms, cap = Infinity) {
    const fits = this.rungs.find((r) => r >= highest) ?? this.rungs[this.rungs.length - 1];
    const rung = highest > cap ? fits : Math.min(fits, cap);
    if (rung >= this.full) this.roomySince = now_ms;
    if (rung === this.full || (rung < this.full && now_ms - this.roomySince < PATIENCE_MS)) {
      return false;
    }
    this.full = rung;
    return true;
  }
}

export const rowScale = () => new Scale([8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]);
export const tokenScale = () => new Scale([16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]);
export const stepScale = () =>
  new Scale([5, 10, 20, 40, 80, 150, 300, 600, 1200, 2500, 5000, 10000]);

const inner = (x0, x1, ratio) => Math.max(x1 - x0 - (x1 - x0 > 3 ? 1 : 0), 1 / ratio);

function stack(ctx, { x0, w, height, unit }, parts) {
  let y = height;
  for (const [amount, fill, least] of parts) {
    if (!(amount > 0)) continue;
    const tall = Math.max(least, amount * unit);
    y -= tall;
    ctx.fillStyle = fill;
    ctx.fillRect(x0, y, w, tall);
  }
  return y;
}

function over(ctx, c, { x0, y, w }) {
  ctx.fillStyle = c.bad;
  ctx.fillRect(x0, y, w, TOP);
}

// The batch has two storeys, since a decode is one token and a chunk may be hundreds, yet a row of
// either is a request: rows below (decode, idle rows, padding), prompt tokens above.
const ROWS_SHARE = 0.42;
export const rowsTop = (height) => Math.round(height * (1 - ROWS_SHARE));

export function paintBatch(ctx, c, columns, index, { x0, x1, height, at, scales }) {
  const s = columns.slot(index),
    w = inner(x0, x1, c.ratio),
    floor = rowsTop(height);
  if (columns.hole[s]) hole(ctx, c, columns, index, { x0, height, at });
  const rows = { x0, w, height, unit: (height - floor - TOP) / scales.rows.full };
  const top = stack(ctx, rows, [
    [columns.decode_tokens[s], c.decode, 2],
    [columns.idle_rows[s], c.held, 1.5],
    [columns.padding_tokens[s], c.padding, 1.5],
  ]);
  if (top < floor) over(ctx, c, { x0, y: floor, w });
  const tokens = { x0, w, height: floor - 1, unit: (floor - 1 - TOP) / scales.tokens.full };
  const high = stack(ctx, tokens, [[columns.prefill_tokens[s], c.prefill, 2]]);
  if (high < 0) over(ctx, c, { x0, y: 0, w });
}

// A tile's time in parts that sum to it: device, launch, plan, commit, and the gap that is left.
// Device and launch overlap once steps are launched ahead, so each takes what is left at most.
export function stepParts(columns, s) {
  let left = columns.end_at_ns[s] - columns.begin_at_ns[s];
  const take = (ns) => {
    const part = Math.min(ns, left);
    left -= part;
    return part;
  };
  const parts = STEP_PARTS.map((name) => take(columns[name][s]));
  return [...parts, left];
}

// Bottom to top: the device, then the host's part. A tile is as tall as it is wide in time.
export function paintStep(ctx, c, columns, index, { x0, x1, height, at, scales }) {
  const s = columns.slot(index),
    w = inner(x0, x1, c.ratio);
  if (columns.hole[s]) hole(ctx, c, columns, index, { x0, height, at });
  const fills = [c.device, c.launch, c.plan, c.commit, c.gap];
  const bars = stepParts(columns, s).map((ns, i) => [ns, fills[i], 0]);
  const top = stack(ctx, { x0, w, height, unit: (height - TOP) / (scales.step.full * 1e6) }, bars);
  if (top < 0) over(ctx, c, { x0, y: 0, w });
}

// Bottom to top: used, cached (hatched), free. A notch marks a preemption, a rim a full pool.
export function paintPool(ctx, c, columns, index, { x0, x1, height, at, total }) {
  const s = columns.slot(index),
    w = Math.max(x1 - x0, 1 / c.ratio);
  if (columns.hole[s]) hole(ctx, c, columns, index, { x0, height, at });
  const unit = (height - TOP) / total;
  const used = columns.kv_blocks_used[s] * unit,
    cached = columns.kv_blocks_cached[s] * unit;
  ctx.fillStyle = c.used;
  ctx.fillRect(x0, height - used, w, used);
  ctx.fillStyle = c.pattern.cached;
  ctx.fillRect(x0, height - used - cached, w, cached);
  if (columns.stop[s] === KV) {
    ctx.fillStyle = c.kv;
    ctx.fillRect(x0, height - used - TOP, w, TOP);
  }
  if (!columns.preempted[s]) return;
  ctx.fillStyle = c.preempted;
  ctx.beginPath();
  ctx.moveTo(x0 - 4, 0);
  ctx.lineTo(x0 + 4, 0);
  ctx.lineTo(x0, 7);
  ctx.fill();
  ctx.fillRect(x0 - 0.75, 0, 1.5, height);
}

// The highest bar of a window, in the strip's own unit.
export function highest(columns, from_ns, to_ns, measure) {
  let most = 0;
  for (let i = columns.find(from_ns); i < columns.count; i++) {
    const s = columns.slot(i);
    if (columns.begin_at_ns[s] > to_ns) break;
    most = Math.max(most, measure(columns, s));
  }
  return most;
}

export const batchRows = (columns, s) =>
  columns.decode_tokens[s] + columns.padding_tokens[s] + columns.idle_rows[s];
export const promptTokens = (columns, s) => columns.prefill_tokens[s];
export const tileMs = (columns, s) => (columns.end_at_ns[s] - columns.begin_at_ns[s]) / 1e6;

// The scales that follow what is in view, by name: what is measured, how a scale begins, and which
// strip is drawn by it.
export const SCALES = Object.freeze({
  rows: { measure: batchRows, create: rowScale, strip: 0 },
  tokens: { measure: promptTokens, create: tokenScale, strip: 0 },
  step: { measure: tileMs, create: stepScale, strip: 1 },
});
