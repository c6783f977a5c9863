// Owns: the last minutes as three uPlot charts that share their cursor with the score. Called by:
// score.js once a second (data) and by the pointer. A click goes there. Seconds in which nothing
// was heard are gaps, never zeros.

import uPlot from '../vendor/uplot/uPlot.esm.js';
import { make } from '../dom.js';

const MINUTES_S = 300;
const LEAST_S = 60;
const CLASS = { muted: 'c1', prefill: 'c2', decode: 'c3' };

const quantiles = (name) => (seconds, second) => [
  seconds.quantile(name, 0.5, second, second + 1),
  seconds.quantile(name, 0.95, second, second + 1),
];
const PAIR = [
  ['p50', 'muted'],
  ['p95', 'prefill'],
];
const CHARTS = [
  { title: 'First token', unit: 'ms', bound: 'ttft_ms', series: PAIR, of: quantiles('firstToken') },
  { title: 'Token gap', unit: 'ms', bound: 'tpot_ms', series: PAIR, of: quantiles('gap') },
  {
    title: 'Tokens a second',
    unit: '',
    series: [
      ['in', 'prefill'],
      ['out', 'decode'],
    ],
    of: (seconds, second) => {
      const s = seconds.of(second);
      return s < 0 ? [0, 0] : [seconds.prefill[s], seconds.decode[s]];
    },
  },
];

export class Overview {
  // `past`: the window is over, so its right edge is its end and not now.
  constructor({ onGo, onCursor, past = false }) {
    Object.assign(this, { onGo, onCursor });
    this.edge = past ? 'end' : 'now';
    this.plots = [];
    this.newest = 0;
    this.slo = null;
    this.hosts = CHARTS.map((chart) => host(chart));
    this.element = make('div', { class: 'overview' }, this.hosts);
  }

  // rem: the size of the type, which canvas text follows.
  build(colours, rem) {
    this.rem = rem;
    this.plots.forEach((plot) => plot.destroy());
    this.plots = CHARTS.map((chart, i) => this.plot(chart, this.hosts[i], colours));
  }

  plot(chart, element, c) {
    const axis = {
      stroke: c.faint,
      font: `${Math.round((11 / 13) * this.rem)}px ${c.font}`,
      grid: { stroke: c.line, width: 1 },
      ticks: { show: false },
    };
    const bound = () => (chart.bound && this.slo?.[chart.bound]) || 0;
    const options = {
      ...this.size(element),
      legend: { show: false },
      padding: [6, 20, 0, 0],
      cursor: { sync: { key: 'minutes' }, drag: { x: false, y: false }, points: { size: 5 } },
      scales: {
        x: { time: false },
        y: { range: (_, least, most) => [0, Math.max(bound() * 1.2 || 1, (most || 0) * 1.1)] },
      },
      axes: [
        {
          ...axis,
          size: Math.round((20 / 13) * this.rem),
          splits: (_, __, least, most) => this.splits(least, most),
          values: (_, seconds) => seconds.map((s) => ago(s - this.newest, this.edge)),
        },
        {
          ...axis,
          size: Math.round((42 / 13) * this.rem),
          gap: 3,
          splits: (_, __, least, most) => [0, round(most)],
          values: (_, v) => v.map((n) => short(n, chart)),
        },
      ],
      series: [
        {},
        ...chart.series.map(([label, colour]) => ({
          label,
          stroke: c[colour],
          width: 1.3,
          points: { show: true, size: 3, filter: lonely },
          spanGaps: false,
        })),
      ],
      hooks: {
        drawClear: [(plot) => this.shade(plot, bound(), c)],
        setCursor: [(plot) => this.moved(plot)],
      },
    };
    const plot = new uPlot(options, [[], ...chart.series.map(() => [])], element);
    plot.over.addEventListener('click', () => this.onGo(plot.posToVal(plot.cursor.left, 'x')));
    return plot;
  }

  // Round distances from now, not round seconds.
  splits(least, most) {
    const step = [15, 30, 60, 120].find((s) => (most - least) / s <= 5) ?? 120;
    const out = [];
    for (let x = this.newest; x >= least; x -= step) out.unshift(x);
    return out;
  }

  moved(plot) {
    if (!plot.cursor.event) return;
    this.onCursor(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, 'x') : null);
  }

  // The window of the score as a shade, the bound as a dashed line.
  shade(plot, bound, c) {
    const { ctx, bbox } = plot;
    if (!this.window || !plot.data[0].length) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const [from, to] = this.window.map((ns) => plot.valToPos(ns / 1e9, 'x', true));
    ctx.fillStyle = c.line;
    ctx.fillRect(from, bbox.top, Math.max(2, to - from), bbox.height);
    if (bound) {
      const y = plot.valToPos(bound, 'y', true);
      ctx.strokeStyle = c.bad;
      ctx.setLineDash([4, 4]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  size(element) {
    return {
      width: Math.max(80, element.clientWidth - 12),
      height: Math.max(40, element.clientHeight - 24),
    };
  }

  resize() {
    this.plots.forEach((plot, i) => plot.setSize(this.size(this.hosts[i])));
  }

  clear() {
    for (const plot of this.plots) plot.setData(plot.data.map(() => []));
  }

  // heard_ns: until when the page knows what happened.
  update(store, view, { now_ns, heard_ns }) {
    this.newest = Math.floor(now_ns / 1e9);
    this.slo = store.slo;
    const some = store.columns.count > store.columns.first;
    this.window = some ? [view.left, view.right] : null;
    const opened = store.openedSecond ?? this.newest,
      from = Math.max(this.newest - MINUTES_S, Math.min(opened, this.newest - LEAST_S));
    const xs = Array.from({ length: this.newest - from + 1 }, (_, i) => from + i);
    const heard = heard_ns / 1e9;
    CHARTS.forEach((chart, i) => {
      const known = (x) => x >= opened && x < this.newest && x < heard;
      const rows = xs.map((x) => (known(x) ? chart.of(store.seconds, x) : null));
      const series = chart.series.map((_, k) => rows.map((row) => (row ? row[k] : null)));
      this.plots[i]?.setData([xs, ...series]);
    });
  }
}

// A value between two gaps has no line, so it gets a point.
function lonely(plot, series) {
  const values = plot.data[series];
  return values.flatMap((v, i) => {
    const alone = (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null;
    return v !== null && alone ? [i] : [];
  });
}

function host({ title, unit, series }) {
  const keys = series.map(([name, colour]) => make('i', { class: CLASS[colour], text: name }));
  return make('div', {}, make('h2', {}, make('b', { text: title }), unit, keys));
}

// The largest of 1, 2, 5, 10, ... that is not above n.
function round(n) {
  const ten = 10 ** Math.floor(Math.log10(n));
  return ten * [5, 2, 1].find((step) => step * ten <= n);
}

function short(n, { unit }) {
  return n < 1000 ? String(n) : `${n / 1000} ${unit === 'ms' ? 's' : 'k'}`;
}

function ago(s, edge) {
  if (s > -0.5) return edge;
  const words = s <= -60 ? `${Math.round(s / 6) / 10} min` : `${s} s`;
  return words.replace('-', '−');
}
