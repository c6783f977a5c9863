// Owns: the six numbers over the score. Called by: page.js 4 times a second. Each has its unit,
// its bound where the requests carry one, a glyph for its state, and a minute of itself. Figures
// of the last 30 s say so by their note; "now" figures come from the newest iteration.
// It must never show a bound that nobody set.

import { make, surface, write } from '../dom.js';
import { duration, int, percent, plural } from '../format.js';
import { STOPS } from '../score/kinds.js';

const WINDOW_S = 30;
const RATE_S = 5; // a rate over longer would lag what one sees
const SPARK_S = 60;
const SPARK_PX = 26;
const FLAG = { good: '', warn: '▲ watch', bad: '■ over', idle: '' };

const grade = (value, warn, bad) =>
  value === null ? 'idle' : value >= bad ? 'bad' : value >= warn ? 'warn' : 'good';

// Each reads a context {store, seconds, from, to, s}: the window of seconds, and the slot of the
// newest iteration (-1 before the first). `spark` gives one second's value, or null.
const quantileNumber = (title, name, bound) => ({
  title,
  bound: ({ store }) => store.slo?.[bound] ?? null,
  spark: (seconds, second) => seconds.quantile(name, 0.95, second, second + 1),
  read: ({ store, seconds, from, to }) => {
    const p95 = seconds.quantile(name, 0.95, from, to),
      p50 = seconds.quantile(name, 0.5, from, to),
      slo = store.slo?.[bound];
    if (p95 === null) {
      return { value: '–', state: 'idle', note: `no token in the last ${to - from} s` };
    }
    return {
      value: duration(p95),
      state: slo ? grade(p95, 0.8 * slo, slo) : 'good',
      note: `p95 · p50 ${duration(p50)}${slo ? ` · SLO ${duration(slo)}` : ` · ${to - from} s`}`,
    };
  },
});

function readEnded({ seconds, from, to }) {
  const sum = (name) => seconds.sum(name, from, to);
  const judged = sum('judged'),
    ended = sum('ended'),
    errors = sum('errors'),
    cancelled = sum('cancelled');
  if (judged) {
    const share = sum('good') / judged;
    return {
      title: 'Goodput',
      value: percent(share),
      state: share < 0.9 ? 'bad' : share < 0.97 ? 'warn' : 'good',
      flag: share < 0.9 ? '■ low' : undefined,
      note: `of ${int(judged)} ended met their SLO`,
    };
  }
  return {
    title: 'Ended',
    value: int(ended),
    unit: `in ${to - from} s`,
    state: errors ? 'bad' : 'good',
    flag: errors ? '■ errors' : undefined,
    note: `${int(cancelled)} cancelled · ${plural(errors, 'error')}`,
  };
}

function readThroughput({ seconds, from, to }) {
  const n = Math.max(1, Math.min(RATE_S, to - from));
  const rate = (name) => {
    const value = seconds.sum(name, to - n, to) / n;
    return value > 0 && value < 9.95 ? value.toFixed(1) : int(value);
  };
  return {
    value: rate('decode'),
    unit: 'tok/s',
    state: 'good',
    note: `out · ${rate('prefill')} tok/s in · ${rate('steps')} steps/s`,
  };
}

function readQueue({ store, s }) {
  if (s < 0) return { value: '0', unit: 'waiting', state: 'idle', note: 'nothing has run yet' };
  const { waiting, running } = store.present();
  return {
    value: int(waiting),
    unit: 'waiting',
    state: grade(waiting, 3, 10),
    note:
      `${int(running)} of ${int(store.run.seqs_max)} rows run · ` +
      `stop: ${STOPS[store.columns.stop[s]]}`,
  };
}

function readPool({ store, seconds, from, to }) {
  const total = store.run.kv_blocks_total,
    { used } = store.present();
  return {
    value: percent(used / total),
    unit: 'used',
    state: grade(used / total, 0.9, 0.97),
    note:
      `${int(used)} of ${int(total)} blocks · ` +
      `${int(seconds.sum('preempted', from, to))} preempted`,
  };
}

const recorded = (name) => (seconds, second) => {
  const s = seconds.of(second);
  return s < 0 ? 0 : seconds[name][s];
};

export const NUMBERS = [
  quantileNumber('First token', 'firstToken', 'ttft_ms'),
  quantileNumber('Token gap', 'gap', 'tpot_ms'),
  { title: 'Ended', spark: recorded('ended'), read: readEnded },
  { title: 'Throughput', spark: recorded('decode'), read: readThroughput },
  { title: 'Queue', spark: recorded('waiting'), read: readQueue },
  {
    title: 'KV cache',
    bound: ({ store }) => store.run.kv_blocks_total,
    spark: (seconds, second) => {
      const s = seconds.of(second);
      return s < 0 ? null : seconds.kv[s];
    },
    read: readPool,
  },
];
const TITLES = {
  'First token': 'From arrival in the engine’s queue to the first token’s commit',
  'Token gap': 'Between the commits of a request’s tokens',
};

export class Numbers {
  constructor() {
    this.cells = NUMBERS.map((number) => cell(number));
    this.element = make(
      'div',
      { class: 'numbers' },
      this.cells.map((c) => c.element),
    );
  }

  measure(rem) {
    const width = this.cells[0].element.clientWidth;
    this.sparkWidth = Math.round(Math.min(0.4 * width, width - 11.4 * rem));
  }

  // Before there is a run, and between two, there is no number to show.
  clear() {
    this.element.classList.remove('stale');
    for (const c of this.cells) {
      write(c.value, '–');
      for (const part of [c.unit, c.note, c.flag]) write(part, '');
      c.element.dataset.state = 'idle';
      c.canvas.getContext('2d').clearRect(0, 0, c.canvas.width, c.canvas.height);
    }
  }

  // `now_ns` is the server's time; the second in progress is left out.
  update(store, colours, now_ns, stale) {
    this.element.classList.toggle('stale', stale);
    const { seconds, columns } = store;
    const to = Math.floor(now_ns / 1e9),
      from = Math.max(to - WINDOW_S, Math.min(to - 1, store.openedSecond ?? to - 1));
    const s = columns.count > columns.first ? columns.slot(columns.last) : -1;
    const context = { store, seconds, from, to, s };
    NUMBERS.forEach((number, i) => {
      const c = this.cells[i],
        reading = number.read(context);
      write(c.title, reading.title ?? number.title);
      write(c.value, reading.value);
      write(c.unit, reading.unit ?? '');
      write(c.note, reading.note);
      write(c.flag, reading.flag ?? FLAG[reading.state]);
      c.element.dataset.state = reading.state;
      const values = [],
        opened = store.openedSecond ?? to;
      for (let second = to - SPARK_S; second < to; second++) {
        values.push(second < opened ? null : number.spark(seconds, second));
      }
      const bound = number.bound ? number.bound(context) : null;
      spark(c.canvas, this.sparkWidth, { values, bound, colours, state: reading.state });
    });
  }
}

function cell(number) {
  const c = {
    title: make('span', { text: number.title }),
    value: make('span', { class: 'n-value' }),
    unit: make('span', { class: 'n-unit' }),
    note: make('div', { class: 'n-note' }),
    flag: make('span', { class: 'n-flag' }),
    canvas: make('canvas', { class: 'n-spark', 'aria-hidden': 'true' }),
  };
  c.element = make(
    'section',
    { class: 'number', title: TITLES[number.title] },
    make('div', { class: 'n-title' }, c.title, c.flag),
    make('div', { class: 'n-row' }, make('div', {}, c.value, c.unit), c.canvas),
    c.note,
  );
  return c;
}

function spark(canvas, width, { values, bound, colours: c, state }) {
  if (!(width > 20)) return;
  const ctx = surface(canvas, width, SPARK_PX);
  ctx.clearRect(0, 0, width, SPARK_PX);
  const top = Math.max(bound || 0, ...values.map((v) => v || 0)) || 1;
  const at = (v) => SPARK_PX - 2 - (v / top) * (SPARK_PX - 4);
  if (bound) {
    ctx.strokeStyle = c.faint;
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(0, at(bound));
    ctx.lineTo(width, at(bound));
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.strokeStyle = state === 'warn' || state === 'bad' ? c[state] : c.muted;
  ctx.lineWidth = 1.4;
  ctx.lineJoin = 'round';
  ctx.beginPath();
  let down = false;
  values.forEach((v, i) => {
    if (v === null) return;
    const x = (i / (SPARK_S - 1)) * (width - 3);
    if (down) ctx.lineTo(x, at(v));
    else ctx.moveTo(x - 1, at(v)); // a px long, so that a value alone shows as a dot
    ctx.lineTo(x, at(v));
    down = true;
  });
  ctx.stroke();
}
