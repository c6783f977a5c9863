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
    [c.prefill_tokens, c.decode_tokens, c.idle_rows, c.padding_tokens].map((column) =>
      int(column[s]),
    ),
  (c, s) => strips.stepParts(c, s).map(ms),
  (c, s) => [c.kv_blocks_used[s], c.kv_blocks_cached[s]].map(int),
];

export class Bands {
  // score: {store, colours}, read at each drawing, since both change.
  constructor({ stage, view, score }) {
    Object.assign(this, { stage, score });
    this.scales = Object.fromEntries(
      Object.entries(strips.SCALES).map(([name, { create }]) => [name, create()]),
    );
    this.tracks = stage.strips.map(({ host }, i) => {
      const paint = (ctx, index, box) =>
        PAINT[i](ctx, score.colours, score.store.columns, index, {
          ...box,
          at: (ns) => view.world(ns) - box.origin,
          scales: this.scales,
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
    for (const { values, bounds } of this.stage.strips) {
      for (const element of [...values, ...bounds]) write(element, '');
    }
  }

  // The full scales follow what is in view.
  fit({ left, right }, now_ms) {
    const { run, columns } = this.score.store,
      { stage } = this;
    const budget = columns.token_budget[columns.slot(columns.last)];
    const caps = { tokens: budget, rows: run.seqs_max };
    for (const [name, { measure, strip }] of Object.entries(strips.SCALES)) {
      const most = strips.highest(columns, left, right, measure);
      const grown = this.scales[name].fit(most, now_ms, caps[name] ?? Infinity);
      if (grown) this.tracks[strip].invalidate();
    }
    const { rows, tokens, step } = this.scales;
    const whole = tokens.full >= budget;
    const [batch, time, pool] = stage.strips.map(({ bounds }) => bounds);
    write(batch[0], `${whole ? '' : int(tokens.full) + ' of '}budget ${int(budget)}`);
    write(batch[1], `${int(rows.full)} rows`);
    write(time[0], duration(step.full));
    write(pool[0], `${int(run.kv_blocks_total)} blocks`);
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
