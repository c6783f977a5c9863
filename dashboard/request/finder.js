// Owns: the Request view without a request: what is in flight and what has ended lately, to choose
// from, and a field for an id. Called by: page.js. A thousand in flight are counted and filtered,
// never all drawn; ended ones come by SQL, or from the page's own store where no history is kept.

import { make, put, write } from '../dom.js';
import { duration, int, plural } from '../format.js';

const SHOWN_MAX = 100;
const AGAIN_MS = 2000;
const ENDED_SQL = `SELECT e.request_id, e.external_id, e.tenant, e.finish, e.prompt_tokens,
  e.output_tokens, e.preemptions, e.request,
  (greatest(coalesce(d.last_write_at_ns, 0), e.released_at_ns) - e.received_at_ns) / 1e6 AS e2e_ms,
  (d.first_write_at_ns - e.received_at_ns) / 1e6 AS ttft_ms
FROM request_end e LEFT JOIN delivery d USING (run_id, request)
WHERE e.run_id = (SELECT run_id FROM run ORDER BY started_unix_us DESC LIMIT 1)
ORDER BY `;
const ORDERS = { newest: 'e.seq DESC', slowest: 'e2e_ms DESC' };

export class Finder {
  // ask(method, path, body) resolves to JSON; the store serves where no history is kept.
  constructor({ ask, onPick, store }) {
    Object.assign(this, { ask, onPick, store });
    this.order = 'newest';
    this.liveRows = [];
    this.endedRows = [];
    this.build();
  }

  build() {
    this.field = make('input', {
      id: 'request-id',
      type: 'search',
      placeholder: '#number, request id, or the client’s own',
      autocomplete: 'off',
      spellcheck: 'false',
      oninput: () => this.show(),
    });
    const form = make(
      'form',
      { class: 'find', role: 'search', onsubmit: (e) => this.submit(e) },
      make('label', { for: 'request-id', text: 'Open a request' }),
      this.field,
      make('button', { class: 'primary', text: 'Open' }),
    );
    this.orders = Object.keys(ORDERS).map((order) =>
      make('button', { class: 'quiet', text: order, onclick: () => this.sort(order) }),
    );
    this.said = make('p', { class: 'muted', role: 'status' });
    this.live = make('div');
    this.ended = make('div');
    this.element = make(
      'div',
      { class: 'finder' },
      make('h1', { text: 'Requests' }),
      form,
      this.said,
      make('section', {}, make('h2', {}, 'In flight'), this.live),
      make(
        'section',
        {},
        make('h2', {}, 'Ended', make('span', { class: 'spacer' }), this.orders),
        this.ended,
      ),
    );
  }

  submit(e) {
    e.preventDefault();
    const id = this.field.value.trim();
    const named = [...this.liveRows, ...this.endedRows].find((r) => '#' + r.request === id);
    if (id) this.onPick(named?.request_id ?? id);
  }

  sort(order) {
    this.order = order;
    this.load();
  }

  // What is in flight is asked for again, but no row changes under a pointer or the focus.
  async frame(now_ms) {
    if (now_ms < (this.due_ms ?? 0) || this.live.matches(':hover, :focus-within')) return;
    this.due_ms = now_ms + AGAIN_MS;
    try {
      const { data } = await this.ask('GET', 'v1/requests');
      this.liveRows = sequences(data, (id) => this.store.find(id)?.id);
      write(this.said, '');
      this.showLive();
    } catch (error) {
      write(this.said, `What is in flight is not known: ${error.message}`);
    }
  }

  async load() {
    this.orders.forEach((b) => b.setAttribute('aria-pressed', b.textContent === this.order));
    const sql = `${ENDED_SQL}${ORDERS[this.order]} LIMIT 500`;
    this.due_ms = 0;
    try {
      this.endedRows = rowsOf(await this.ask('POST', 'telemetry/sql', { sql }));
    } catch {
      this.endedRows = this.fromStore(); // no history is kept, or it cannot be asked now
    }
    this.showEnded();
  }

  fromStore() {
    return this.store.ended.slice(-500).reverse().filter((r) => r.end).map((r) => ({
      ...r.end,
      e2e_ms: (r.end.released_at_ns - r.end.received_at_ns) / 1e6,
      ttft_ms: r.first_token_ns ? (r.first_token_ns - r.end.received_at_ns) / 1e6 : null,
    }));
  }

  show() {
    this.showLive();
    this.showEnded();
  }

  fitting(rows) {
    const wanted = this.field.value.trim().toLowerCase();
    return rows.filter(({ request_id, external_id, tenant, request }) =>
      [request_id, external_id, tenant, '#' + request].some((value) =>
        String(value ?? '').toLowerCase().includes(wanted),
      ),
    );
  }

  showLive() {
    const none = 'Nothing is in flight.';
    put(this.live, table(this.fitting(this.liveRows), LIVE, this.onPick, none));
  }

  showEnded() {
    const none = 'Nothing has ended on this server yet.';
    put(this.ended, table(this.fitting(this.endedRows), ENDED, this.onPick, none));
  }
}

const sequences = (data, numberOf) =>
  data.flatMap(({ external_id, age_ms, sequences: those }) =>
    those.map((one) => ({ ...one, external_id, age_ms, request: numberOf(one.request_id) })),
  );

const rowsOf = ({ columns, rows }) =>
  rows.map((row) => Object.fromEntries(columns.map(({ name }, i) => [name, row[i]])));

const LIVE = [
  ['state', (row) => row.state],
  ['age', (row) => duration(row.age_ms), 'num'],
  ['prompt', (row) => int(row.prompt_tokens), 'num'],
  ['output', (row) => `${int(row.output_tokens)} of ${int(row.max_tokens)}`, 'num'],
];
const ENDED = [
  ['finish', (row) => row.finish],
  ['tenant', (row) => row.tenant],
  ['whole', (row) => duration(row.e2e_ms), 'num'],
  ['first token', (row) => duration(row.ttft_ms), 'num'],
  ['prompt', (row) => int(row.prompt_tokens), 'num'],
  ['output', (row) => int(row.output_tokens), 'num'],
  ['preempted', (row) => (row.preemptions ? int(row.preemptions) : '–'), 'num'],
];

const beyond = (count) =>
  `and ${plural(count, 'other')}: a part of an id above narrows the list`;

const title = ([text, , kind]) => make('th', { scope: 'col', class: kind, text });

function table(rows, columns, onPick, none) {
  if (!rows.length) return make('p', { class: 'muted', text: none });
  const more = rows.length - SHOWN_MAX;
  const head = [['request'], ...columns];
  const cell = ([, read, kind], row) => make('td', { class: kind, text: read(row) });
  return make(
    'div',
    { class: 'req-scroll' },
    make(
      'table',
      { class: 'requests' },
      make('thead', {}, make('tr', {}, head.map(title))),
      make(
        'tbody',
        {},
        rows.slice(0, SHOWN_MAX).map((row) =>
          make(
            'tr',
            {},
            make(
              'th',
              { scope: 'row' },
              make('span', { class: 'number-of', text: row.request ? `#${row.request}` : '' }),
              make('button', {
                class: 'link-name mono',
                text: row.request_id,
                onclick: () => onPick(row.request_id),
              }),
              row.external_id && make('small', { text: row.external_id }),
            ),
            columns.map((column) => cell(column, row)),
          ),
        ),
      ),
    ),
    more > 0 && make('p', { class: 'more', text: beyond(more) }),
  );
}
