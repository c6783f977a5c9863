// Owns: an answer as a table: numbers to the right, instants in words, ids of requests as links,
// and no more rows on screen at once than a page can hold. Called by: console.js. It must never
// turn what a cell says into markup.

import { make, put } from '../dom.js';
import { int, plural, timeOfDay } from '../format.js';
import { addressOf } from '../router.js';

const ROWS_AT_ONCE = 200;
const CELL_MOST = 200;
const ONE_LINE_MOST = 48; // longer texts may take several
const NUMERIC = /^(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL.*|REAL)$/;
const REQUEST = /(^|_)request_id$|^(for_example|head|neighbour|largest_neighbour)$/;

export class Table {
  constructor() {
    this.element = make('div', { class: 'answer', tabindex: 0, role: 'region' });
    this.element.setAttribute('aria-label', 'Answer');
  }

  clear() {
    put(this.element);
  }

  show(answer, emptyWords) {
    const { columns, rows } = answer;
    if (!rows.length) {
      put(this.element, make('p', { class: 'hush pad', text: emptyWords }));
      return;
    }
    const numeric = columns.map(({ type }) => NUMERIC.test(type));
    const head = columns.map(({ name, type }, i) =>
      make(
        'th',
        { scope: 'col', class: numeric[i] && 'num' },
        name,
        make('small', { text: type.toLowerCase() }),
      ),
    );
    const body = make('tbody');
    const more = make('button', { class: 'quiet', onclick: () => add() });
    let shown = 0;
    const add = () => {
      const next = rows.slice(shown, shown + ROWS_AT_ONCE);
      body.append(...next.map((row) => line(row, columns, numeric)));
      shown += next.length;
      more.hidden = shown === rows.length;
      more.textContent = `Show more: ${int(shown)} of ${plural(rows.length, 'row')}`;
    };
    add();
    put(this.element, make('table', {}, make('thead', {}, make('tr', {}, head)), body), more);
    this.element.scrollTop = 0;
  }
}

function line(row, columns, numeric) {
  return make(
    'tr',
    {},
    row.map((value, i) => make('td', { class: numeric[i] && 'num' }, cell(value, columns[i]))),
  );
}

function cell(value, { name, type }) {
  if (value === null) return make('span', { class: 'faint', text: '–' });
  if (name.endsWith('unix_us') && typeof value === 'number') return instant(value);
  if (typeof value === 'string' && REQUEST.test(name)) {
    return make('a', { href: addressOf('request', { id: value }), text: value });
  }
  const text = wording(value, type);
  if (text.length <= ONE_LINE_MOST) return text;
  if (text.length <= CELL_MOST) return make('span', { class: 'long', text });
  const begin = text.slice(0, CELL_MOST) + '…';
  return make('span', { class: 'long', title: text.slice(0, 4000), text: begin });
}

function wording(value, type) {
  if (typeof value === 'object') return JSON.stringify(value);
  if (typeof value !== 'number') return String(value);
  if (Number.isInteger(value) && NUMERIC.test(type)) {
    return (Number.isSafeInteger(value) ? '' : '≈ ') + int(value); // beyond it digits are lost
  }
  return value.toLocaleString('en-US', { maximumFractionDigits: 3 });
}

function instant(us) {
  const date = new Date(us / 1e3);
  const day = date.toLocaleDateString('en-CA');
  return make('span', { title: `${us} µs since 1970` }, `${day} ${timeOfDay(0, us, 3)}`);
}
