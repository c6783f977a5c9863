// Owns: a comparison in elements: the waterfall from A to B, the figures, the settings that differ,
// and the sentence above them. Called by: compare/page.js. It must never judge: what counts as a
// change is the server's word.

import { make } from '../dom.js';
import { duration, int } from '../format.js';
import { falls, scaleOf } from './falls.js';

const WORDS = { better: '▼ better', worse: '▲ worse', same: 'same', unknown: 'cannot be told' };

const signed = (value, write) => (value < 0 ? '−' : '+') + write(Math.abs(value));
const ms = (value) => (Number.isFinite(value) ? duration(value) : '–');

// What the whole comes to, in one sentence.
export function verdict({ worse, diff }) {
  const { request } = diff;
  const all = [...diff.figures, ...diff.causes];
  const bad = all.filter((change) => change.verdict === 'worse').length,
    good = all.filter((change) => change.verdict === 'better').length;
  const whole = `A mean request took ${ms(request.a)} in A and ${ms(request.b)} in B.`;
  const beyond = 'beyond what blocks of time differ by anyway (95 %, all together)';
  if (!bad && !good) {
    const unsure = all.filter((change) => change.verdict === 'unknown').length;
    const why = unsure ? ` Of ${unsure} too little is on record to tell.` : '';
    return {
      level: 'same',
      head: 'No difference',
      body: `${whole} Nothing differs ${beyond}.${why}`,
    };
  }
  const parts = [bad && `${bad} worse`, good && `${good} better`].filter(Boolean).join(', ');
  const body = `${whole} Figures and causes ${beyond}: ${parts}.`;
  if (worse) return { level: 'worse', head: 'B is worse', body };
  return bad
    ? { level: 'same', head: 'Mixed', body }
    : { level: 'better', head: 'B is better', body };
}

export function waterfall(diff) {
  const rows = falls(diff);
  const scale = scaleOf(rows);
  const share = (value) =>
    Math.max(0, ((value - scale.from_ms) / (scale.to_ms - scale.from_ms || 1)) * 100);
  const line = (row) => {
    const left = share(Math.min(row.from_ms, row.to_ms)),
      right = share(Math.max(row.from_ms, row.to_ms));
    const bar = make('i', { 'data-kind': row.kind, 'data-verdict': row.verdict });
    bar.style.left = left + '%';
    bar.style.width = Math.max(0.3, right - left) + '%';
    const known = row.low !== null && row.low !== undefined;
    const within = known ? `${signed(row.low, ms)} to ${signed(row.high, ms)}` : '';
    const amount = row.kind === 'total' ? ms(row.delta_ms) : signed(row.delta_ms, ms);
    return make(
      'tr',
      { class: row.kind === 'total' && 'total' },
      make('th', { scope: 'row' }, make('code', { text: row.name })),
      make('td', { class: 'fall-bar' }, make('div', {}, bar)),
      make('td', { class: 'num', text: amount }),
      make('td', { class: 'num faint', text: within }),
      make('td', { 'data-verdict': row.verdict, text: wordOf(row) }),
    );
  };
  return make(
    'section',
    { class: 'cmp-falls' },
    make(
      'h2',
      {},
      'What changed',
      make('span', { class: 'when', text: 'a mean request, by cause, doing the same work' }),
    ),
    make('table', { class: 'falls' }, make('tbody', {}, rows.map(line))),
    scale.cut &&
      make('p', { class: 'faint', text: `The bars begin at ${ms(scale.from_ms)}, not at zero.` }),
  );
}

const wordOf = ({ kind, verdict }) =>
  kind === 'total' || kind === 'rest' || verdict === 'same' ? '' : WORDS[verdict];

export function figures(diff) {
  const cell = (value, { a, b, unit }) => (unit === 'ms' ? ms(value) : number(value, a, b));
  const line = (change) => {
    const share = change.a > 0 ? (change.b - change.a) / change.a : NaN;
    const more = Number.isFinite(share)
      ? ` ${signed(share * 100, (n) => `${n.toFixed(1)} %`)}`
      : '';
    const up = change.b > change.a ? '▲' : '▼';
    const told = ['better', 'worse'].includes(change.verdict);
    const words = told ? `${up}${more} ${change.verdict}` : WORDS[change.verdict];
    return make(
      'tr',
      {},
      make(
        'th',
        { scope: 'row' },
        change.name,
        change.unit !== 'ms' && make('small', { class: 'faint', text: ' ' + change.unit }),
      ),
      make('td', { class: 'num', text: cell(change.a, change) }),
      make('td', { class: 'num', text: cell(change.b, change) }),
      make('td', { class: 'num', 'data-verdict': change.verdict, text: words }),
    );
  };
  const heads = ['figure', 'A', 'B', 'change'].map((text, i) =>
    make('th', { scope: 'col', class: i > 0 && 'num', text }),
  );
  return make(
    'section',
    {},
    make('h2', { text: 'Figures' }),
    make(
      'table',
      { class: 'figures' },
      make('thead', {}, make('tr', {}, heads)),
      make('tbody', {}, diff.figures.map(line)),
    ),
  );
}

export function settings({ settings: changed }) {
  if (!changed.length) return null;
  const text = (values) => values.map((value) => JSON.stringify(value)).join(', ') || '–';
  return make(
    'section',
    {},
    make('h2', {}, 'Set differently', make('span', { class: 'when', text: int(changed.length) })),
    make(
      'table',
      { class: 'figures' },
      make(
        'tbody',
        {},
        changed.map(({ name, a, b }) =>
          make(
            'tr',
            {},
            make('th', { scope: 'row' }, make('code', { text: name })),
            make('td', { text: text(a) }),
            make('td', { text: text(b) }),
          ),
        ),
      ),
    ),
  );
}

export const notes = ({ notes: said }) =>
  said.map((text) => make('p', { class: 'cmp-note', text: `▲ ${text}` }));

// Both sides with as many decimals as give the larger three digits.
function number(value, a, b) {
  if (!Number.isFinite(value)) return '–';
  const most = Math.max(...[a, b].filter(Number.isFinite).map(Math.abs), 1e-9);
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(most))));
  const options = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return value.toLocaleString('en-US', options);
}
