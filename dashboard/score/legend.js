// Owns: the legend, drawn by the same functions as the lanes. Called by: score.js, live/empty.js.
// Kinds that the run cannot show are left out. It must never draw a shape of its own.

import { make, put, surface } from '../dom.js';
import { KIND, isMark } from './kinds.js';
import { LEGEND, LEGEND_MARKS, body, mark } from './marks.js';

export function sample(colours, kind, amount, width = 22, height = 11) {
  const canvas = make('canvas', { 'aria-hidden': 'true' });
  const ctx = surface(canvas, width, height);
  if (isMark(kind)) {
    const x0 = kind === KIND.HIT ? width - 4 : width / 2 - 2;
    mark(ctx, colours, kind, { x0, x1: width / 2 - 1, y: 1, h: height - 2 });
    return canvas;
  }
  const parts = kind === KIND.DECODE ? 4 : 1,
    w = width / parts;
  for (let i = 0; i < parts; i++) {
    body(ctx, colours, kind, { x0: i * w, x1: (i + 1) * w, y: 0, h: height }, amount);
  }
  return canvas;
}

export function entries(run) {
  const fixed = run && run.batching !== 'continuous';
  return [...LEGEND.filter(([kind]) => fixed || kind !== KIND.HELD), ...LEGEND_MARKS];
}

export function legend(host, colours, run) {
  put(
    host,
    entries(run).map(([kind, name, sentence, amount]) =>
      make(
        'span',
        { title: sentence },
        sample(colours, kind, amount, isMark(kind) ? 16 : 22),
        name,
      ),
    ),
  );
}
