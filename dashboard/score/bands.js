// Owns: the three strips under the lanes (batch, step, KV): their tracks, the full scale of each,
// and the figures in their gutters. Called by: score.js. How a column looks is strips.js's.
// It must never draw what is not on record: a strip without iterations shows no figure.

import { write } from '../dom.js';
import { duration, int } from '../format.js';
import * as strips from './strips.js';
import { Track } from './track.js';

const PAINT = [strips.paintBatch, strips.paintStep, strips.paintPool];

const ms = (ns) => {
  const value = Math.max(0, ns) / 1e6;
  return value < 100 ? value.toFixed(1) : int(value);
};

// What the gutters say of the iteration in slot s, in the order of their rows (stage.js).
const FIGURES = [
  (c, s) =>
    [c.decode_tokens, c.prefill_tokens, c.padding_tokens, c.idle_rows].map((column) =>
      int(column[s]),
    ),
  (c, s) => strips.stepParts(c, s).map(ms),
  (c, s) => [c.kv_blocks_used[s], c.kv_blocks_cached[s]].map(int),
];

export class Bands {
  // score: {store, colours}, read at each drawing, since both change.
  constructor({ stage, view, score }) {
    Object.assign(this, { stage, score });
    this.scales = [strips.tokenScale(), strips.stepScale(), null];
    this.tracks = stage.strips.map(({ host }, i) => {
      const paint = (ctx, index, box) =>
        PAINT[i](ctx, score.colours, score.store.columns, index, {
          ...box,
          at: (ns) => view.world(ns) - box.origin,
          scale: this.scales[i],
          total: score.store.run.kv_blocks_total,
        });
      return new Track({ host, view, paint });
    });
  }

  frame(columns) {
    for (const track of this.tracks) track.frame(columns);
  }

  invalidate() {
    for (const track of this.tracks) track.invalidate();
  }

  measure() {
    this.tracks.forEach((track, i) => track.resize(this.stage.strips[i].host.clientHeight));
  }

  clear() {
    for (const { values, bound } of this.stage.strips) {
      for (const element of [...values, bound]) write(element, '');
    }
  }

  // The full scales follow what is in view.
  fit({ left, right }, now_ms) {
    const { run, columns } = this.score.store,
      { stage } = this;
    const bars = [strips.batchTokens, strips.tileMs];
    const budget = columns.token_budget[columns.slot(columns.last)];
    bars.forEach((measure, i) => {
      const most = strips.highest(columns, left, right, measure);
      const cap = i === 0 ? budget : Infinity;
      if (this.scales[i].fit(most, now_ms, cap)) this.tracks[i].invalidate();
    });
    const [tokens, step] = this.scales;
    const whole = tokens.full >= budget;
    write(stage.strips[0].bound, `${whole ? '' : int(tokens.full) + ' of '}budget ${int(budget)}`);
    write(stage.strips[1].bound, duration(step.full));
    write(stage.strips[2].bound, `${int(run.kv_blocks_total)} blocks`);
  }

  // Figures of the iteration in slot s; `pool` is {used, cached} where now differs from it.
  write(s, pool) {
    const { columns } = this.score.store;
    const values = FIGURES.map((figures) => figures(columns, s));
    if (pool) values[2] = [pool.used, pool.cached].map(int);
    this.stage.strips.forEach((strip, i) => {
      values[i].forEach((value, k) => write(strip.values[k], value));
    });
  }
}
