// Owns: the elements of the Live view: toolbar, score, strips, axis, and the plane above them that
// takes the pointer. Called by: score.js, which fills them. Layout only: it reads no record.

import { make } from '../dom.js';

// title, unit, series from top to bottom: [name, colour variable]; bounds: labelled full scales,
// one a storey, by the class of the place where each stands
export const STRIPS = [
  {
    title: 'Batch',
    unit: 'tokens',
    series: [
      ['prefill', 'prefill'],
      ['decode', 'decode'],
      ['idle rows', 'held'],
      ['padding', 'padding'],
    ],
    bounds: ['bound', 'bound rows'],
  },
  {
    title: 'Step',
    unit: 'ms',
    series: [
      ['device', 'device'],
      ['launch', 'launch'],
      ['plan', 'plan'],
      ['commit', 'commit'],
      ['gap', 'gap'],
    ],
  },
  {
    title: 'KV',
    unit: 'blocks',
    series: [
      ['used', 'used'],
      ['cached', 'cached'],
    ],
  },
];

export function toolbar({ onFollow, onZoom }) {
  const follow = onFollow
    ? make('button', { class: 'quiet', text: 'Pause', onclick: onFollow })
    : null;
  const legend = make('div', { class: 'legend' });
  const zoom = (text, words, factor) =>
    make('button', {
      class: 'quiet',
      text,
      title: words,
      'aria-label': words,
      onclick: () => onZoom(factor),
    });
  const element = make(
    'div',
    { class: 'tools' },
    follow,
    legend,
    zoom('−', 'Zoom out (-)', 0.8),
    zoom('+', 'Zoom in (+)', 1.25),
  );
  return { element, follow, legend };
}

// One strip: its gutter with live figures, its band, the labels of its full scales.
function strip({ title, unit, series, bounds: places = ['bound'] }) {
  const values = series.map(() => make('dd'));
  const bounds = places.map(() => make('b'));
  const lines = places.map((place, i) => make('div', { class: place }, bounds[i]));
  const host = make('div', { class: 'band' }, lines);
  const rows = series.flatMap(([name, colour], i) => [
    make('dt', { class: 'fill-' + colour }),
    make('dd', { text: name }),
    values[i],
  ]);
  const gutter = make(
    'div',
    { class: 'gutter' },
    make('h2', {}, title, make('span', { class: 'faint', text: unit })),
    make('dl', {}, rows),
  );
  return { gutter, host, bounds, values };
}

export function tracks() {
  const score = make('div', { class: 'band score' });
  const gutter = make('div', { class: 'gutter lanes' });
  const ticks = make('div', { class: 'plane under' });
  const strips = STRIPS.map(strip);
  const span = make('span', { class: 'span' });
  const hairText = make('b');
  const parts = {
    hair: make('div', { class: 'hair', hidden: true }, hairText),
    before: make('div', { class: 'before', hidden: true }, make('span')),
    gone: make('div', { class: 'gone', hidden: true, text: 'no data' }),
    pill: make('div', { class: 'pill', hidden: true }),
    beyond: make('div', { class: 'beyond', hidden: true }),
  };
  const plane = make(
    'div',
    {
      class: 'plane',
      tabindex: 0,
      role: 'application',
      'aria-label': 'Lanes of requests over time; arrow keys move the cursor',
    },
    Object.values(parts),
  );
  const element = make(
    'div',
    { class: 'tracks' },
    ticks,
    gutter,
    score,
    strips.flatMap((s) => [s.gutter, s.host]),
    make('div', { class: 'gutter faint', title: 'Width of the window; + and - zoom' }, span),
    make('div', { class: 'axis' }),
    plane,
  );
  return { element, score, gutter, ticks, strips, span, hairText, plane, ...parts };
}
