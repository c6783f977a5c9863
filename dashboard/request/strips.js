// Owns: how the gap strip, the blocks and the batch row over time are drawn under a request's lane.
// Called by: picture.js, with a scale and a box. Pure drawing: what a bar means stands in gaps.js.

import { duration, int } from '../format.js';
import { spanAt } from './lane.js';

const HEAD = 18; // px above the bars, where a cut bar's mark has room

// What a gap's bar is filled with: usual green, a neighbour's prefill blue, else the lanes' own.
function fillOf(c, kind) {
  return {
    usual: c.decode,
    prefill: c.prefill,
    preempted: c.preempted,
    host: c.launch,
  }[kind];
}

export function drawGaps(ctx, c, strip, { scale, y, height, rem }) {
  const room = height - HEAD,
    unit = room / strip.ceiling,
    base = y + height;
  for (const bar of strip.bars) {
    if (bar.to_ms < scale.from_ms || bar.from_ms > scale.to_ms) continue;
    const x1 = scale.x(bar.to_ms);
    const w = Math.max(1, Math.min(0.6 * rem, x1 - scale.x(bar.from_ms) - 1));
    const tall = Math.min(room, bar.ms * unit);
    ctx.fillStyle = fillOf(c, bar.kind);
    ctx.fillRect(x1 - w, base - tall, w, tall);
    if (bar.over) {
      ctx.fillStyle = c.bad;
      ctx.fillRect(x1 - w, base - tall - 3, w, 2);
    }
    if (bar.ms > strip.ceiling * 1.001) {
      ctx.fillStyle = c.bg;
      ctx.fillRect(x1 - w - 1, base - tall + 6, w + 2, 2);
      ctx.fillRect(x1 - w - 1, base - tall + 10, w + 2, 2);
    }
  }
  ctx.fillStyle = c.line;
  ctx.fillRect(scale.left, base, scale.width, 1);
  if (strip.limit_ms === null) return;
  const line = base - Math.min(room, strip.limit_ms * unit);
  ctx.strokeStyle = c.bad;
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(scale.left, line);
  ctx.lineTo(scale.left + scale.width, line);
  ctx.stroke();
  ctx.setLineDash([]);
}

// Names of the slow gaps, the slowest first, each only where no other name stands.
export function nameGaps(ctx, c, strip, { scale, y, height, words, rem }) {
  const taken = [],
    right = scale.left + scale.width;
  const line = 1.3 * rem;
  ctx.textAlign = 'left';
  ctx.textBaseline = 'middle';
  for (const gap of strip.named) {
    if (gap.at_ms < scale.from_ms || gap.at_ms > scale.to_ms) continue;
    const text = words(gap),
      wide = ctx.measureText(text).width + 10;
    const at = scale.x(gap.at_ms);
    const left = at + wide > right ? Math.max(scale.left, at - wide - 8) : at + 4;
    const tall = Math.min(height - HEAD, (gap.ms / strip.ceiling) * (height - HEAD));
    const top = y + height - tall + line / 2;
    const meets = (row) => ([a, b, r]) =>
      left < b && left + wide > a && Math.abs(r - row) < line;
    const free = (row) => row > y && !taken.some(meets(row));
    const row = [0, 1, 2, 3].map((k) => top + k * line).find((r) => free(r));
    if (row === undefined || row > y + height - line / 2) continue;
    taken.push([left, left + wide, row]);
    ctx.fillStyle = c.bg;
    ctx.globalAlpha = 0.88;
    ctx.fillRect(left, row - line / 2 + 1, wide, line - 2);
    ctx.globalAlpha = 1;
    ctx.fillStyle = c.text;
    ctx.fillText(text, left + 4, row);
  }
}

// A column of the lane over time, `bars` from the ground or a `line` hanging at its value.
export function drawColumn(ctx, lane, { values, scale, y, height, fill, hangs }) {
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  ctx.fillStyle = fill;
  for (let i = Math.max(0, spanAt(lane, scale.from_ms)); i < values.length; i++) {
    if (lane.begin_ms[i] > scale.to_ms) break;
    if (values[i] === null) continue;
    const x0 = scale.x(lane.begin_ms[i]);
    while (values[i + 1] === values[i]) i++; // one bar, without seams
    const w = Math.max(0.5, scale.x(lane.end_ms[i]) - x0);
    const share = values[i] / most;
    if (hangs) ctx.fillRect(x0, y + share * (height - 3), w, 2);
    else ctx.fillRect(x0, y + height - share * height, w, share * height);
  }
}

export function drawAxis(ctx, c, { scale, height, rem }) {
  ctx.textAlign = 'left';
  ctx.textBaseline = 'alphabetic';
  for (const at_ms of scale.ticks(7 * rem)) {
    const x = Math.round(scale.x(at_ms));
    ctx.fillStyle = c.line;
    ctx.fillRect(x, 0, 1, height - 1.25 * rem);
    ctx.fillStyle = c.faint;
    const words = at_ms ? '+' + duration(at_ms) : 'received';
    if (x + 4 + ctx.measureText(words).width > scale.left + scale.width + rem) continue;
    ctx.fillText(words, x + 4, height - 0.35 * rem);
  }
}

export const gutterOfGaps = ({ p50, p95, max, limit_ms }) =>
  [
    ['p50', duration(p50)],
    ['p95', duration(p95)],
    ['max', duration(max)],
    limit_ms === null ? null : ['SLO', duration(limit_ms)],
  ].filter(Boolean);

export const most = (values) => int(Math.max(0, ...values.map((value) => value ?? 0)));
