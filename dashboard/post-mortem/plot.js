// Owns: the picture of an answer: what chart.js chose, drawn by uPlot in the page's colours. Called
// by: console.js. Causes keep the hue they have in the score; everything else has a fixed order of
// hues. What did not fit is said in words.

import uPlot from '../vendor/uplot/uPlot.esm.js';
import { make, put } from '../dom.js';
import { timeOfDay } from '../format.js';

const HEIGHT_REM = 15;
const HUES = ['prefill', 'decode', 'kv', 'wait', 'preempted', 'device', 'held', 'recompute'];

export class Plot {
  constructor() {
    this.canvas = make('div', { class: 'plot-host' });
    this.keys = make('div', { class: 'plot-keys' });
    this.element = make('figure', { class: 'plot', hidden: true }, this.keys, this.canvas);
    this.plot = null;
    this.model = null;
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  theme(colours) {
    this.colours = colours;
    this.draw();
  }

  // model of chart.js or null; unit names the y axis.
  show(model, unit = '') {
    Object.assign(this, { model, unit });
    this.element.hidden = !model;
    this.draw();
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width > 80 && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.plot.height });
    }
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const { model, colours } = this;
    if (!model || !colours) return;
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const size = { width: Math.max(80, this.canvas.clientWidth), height: HEIGHT_REM * rem };
    const series = model.kind === 'stacked' ? stacked(model.series) : model.series;
    const options = { ...size, ...looks(model, { colours, rem, unit: this.unit, series }) };
    this.plot = new uPlot(options, [model.x, ...series.map(({ values }) => values)], this.canvas);
    this.legend();
  }

  legend() {
    const { model } = this;
    const one = model.series.length === 1 ? `${model.series[0].name}` : null;
    put(
      this.keys,
      one
        ? make('b', { text: one })
        : model.series.map(({ name }, i) =>
            make('span', {}, make('i', { class: 'fill-' + HUES[i % HUES.length] }), name),
          ),
      this.unit && make('span', { class: 'faint', text: this.unit }),
      model.left_out > 0 && make('span', { class: 'faint', text: `${model.left_out} not shown` }),
    );
  }
}

// Each series on top of those before it; drawn from the highest down, so that each stays visible.
function stacked(series) {
  const sums = series[0].values.map(() => 0);
  return series.map(({ name, values }) => ({
    name,
    values: values.map((value, i) => (sums[i] += value ?? 0)),
  }));
}

const hueOf = (label, c) => {
  if (label === 'queue_kv') return c.kv;
  if (/^(queue|passed)/.test(label)) return c.wait;
  if (label.startsWith('preempted')) return c.preempted;
  if (label.endsWith('decode')) return c.decode;
  if (label.endsWith('prefill')) return c.prefill;
  return { recompute: c.recompute, batch_held: c.held, padding: c.padding }[label] ?? c.device;
};

function looks(model, { colours: c, rem, unit, series }) {
  const font = `${(11 * rem) / 13}px ${c.font}`;
  const axis = {
    stroke: c.faint,
    font,
    grid: { stroke: c.line, width: 1 },
    ticks: { show: false },
  };
  const { kind, x } = model;
  const bars = kind === 'bars';
  const pad = (least, most) => (least === most ? [least - 1, most + 1] : [least, most]);
  return {
    legend: { show: false },
    padding: [10, 12, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: {
      x: { time: false, range: (_, a, b) => (bars ? [-0.6, x.length - 0.4] : pad(a, b)) },
      y: { range: (_, least, most) => [Math.min(0, least ?? 0), (most || 1) * 1.1] },
    },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 2 * rem,
        space: 7 * rem,
        splits: bars ? () => x : undefined,
        values: valuesOf(model, rem),
      },
      { ...axis, size: 5 * rem, values: (_, v) => v.map(short) },
    ],
    series: [
      {},
      ...series.map(({ name }, i) => ({
        label: `${name}${unit ? ' ' + unit : ''}`,
        ...strokes(model, c, i),
      })),
    ],
    bands: kind === 'stacked' ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
  };
}

function valuesOf({ kind, labels, time }, rem) {
  if (kind === 'bars') {
    const room = (plot) => plot.width / Math.max(1, labels.length) / (0.52 * rem);
    return (plot, at) => at.map((i) => cut(labels[i] ?? '', Math.floor(room(plot))));
  }
  if (time) return (_, at) => at.map((s) => timeOfDay(0, s * 1e6));
  return (_, at) => at.map(short);
}

const cut = (text, most) =>
  text.length > most ? text.slice(0, Math.max(1, most - 1)) + '…' : text;

function strokes({ kind, labels, x }, c, i) {
  const hue = c[HUES[i % HUES.length]];
  if (kind === 'bars') {
    const disp = { fill: { unit: 3, values: () => labels.map((label) => hueOf(label, c)) } };
    return {
      width: 0,
      paths: uPlot.paths.bars({ size: [0.62, 64], disp }),
      points: { show: false },
    };
  }
  const dots = kind === 'scatter' || x.length < 40;
  return {
    stroke: hue,
    width: kind === 'scatter' ? 1 : 1.6,
    dash: kind === 'scatter' ? [3, 4] : undefined,
    fill: kind === 'stacked' ? hue + '66' : undefined,
    spanGaps: kind === 'scatter',
    points: { show: dots, size: 5, fill: c.bg },
  };
}

function short(n) {
  const size = Math.abs(n);
  if (size >= 1e9) return `${n / 1e9} G`;
  if (size >= 1e6) return `${n / 1e6} M`;
  return size >= 1e4 ? `${n / 1e3} k` : String(Math.round(n * 1e4) / 1e4);
}
