// Owns: the list at the left of a post-mortem: the score, what is wrong now (each lint with how
// much it found), the named queries, free SQL. Called by: page.js. Lints are asked two at a time
// when the window changed; whatever is asked anew shows what it found before, greyed.

import { make, put } from '../dom.js';
import { int, plural } from '../format.js';

const AT_ONCE = 2;
const GLYPH = { bad: '▲', good: '✓', wait: '·', error: '?' };

export class Menu {
  // onPick({show, query}): the score, a named query, or free SQL (query null).
  constructor({ onPick }) {
    this.onPick = onPick;
    this.queries = [];
    this.found = new Map();
    this.run = null;
    this.element = make('nav', { class: 'pm-menu', 'aria-label': 'Score, lints and queries' });
  }

  list(queries) {
    this.queries = queries;
    this.draw();
  }

  current({ show, query }) {
    this.chosen = show === 'score' ? 'score' : (query ?? 'sql');
    for (const button of this.element.querySelectorAll('button')) this.light(button);
  }

  light(button) {
    if (button.dataset.name === this.chosen) button.setAttribute('aria-current', 'page');
    else button.removeAttribute('aria-current');
  }

  item(name, title, note, pick, more = {}) {
    const button = make(
      'button',
      { 'data-name': name, title: note, onclick: pick, ...more.attributes },
      more.before,
      make('span', { text: title }),
      more.after,
    );
    this.light(button);
    return button;
  }

  draw() {
    const of = (kind) => this.queries.filter((query) => query.kind === kind);
    const named = (query) => () => this.onPick({ show: 'query', query: query.name });
    const lints = of('lint').map((query) => ({ query, state: this.stateOf(query) }));
    const order = { bad: 0, error: 1, wait: 2, good: 3 };
    lints.sort((a, b) => order[a.state] - order[b.state]);
    const bad = lints.filter(({ state }) => state === 'bad').length;
    const asked = lints.filter(({ state }) => state !== 'wait').length;
    const score = this.item('score', 'Score', 'What the batch did in this window', () =>
      this.onPick({ show: 'score', query: null }),
    );
    const sql = this.item('sql', 'SQL', 'Any one SELECT', () =>
      this.onPick({ show: 'query', query: null }),
    );
    const summary =
      asked < lints.length
        ? `${asked} of ${lints.length} asked`
        : bad
          ? `${bad} of ${lints.length}`
          : 'nothing';
    const focused = document.activeElement?.dataset?.name;
    put(
      this.element,
      make('h2', { text: 'Window' }),
      score,
      sql,
      make(
        'h2',
        {},
        'Wrong now',
        make('span', { class: 'when', text: lints.length ? summary : '' }),
      ),
      lints.map(({ query, state }) => this.lint(query, state, named(query))),
      make('h2', { text: 'Questions' }),
      of('post_mortem').map((query) =>
        this.item(query.name, query.title, query.meaning, named(query)),
      ),
      make('h2', { text: 'Laws of the record' }),
      of('law').map((query) => this.item(query.name, query.title, query.meaning, named(query))),
    );
    if (focused && this.element.contains(document.activeElement) === false) {
      this.element.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
    }
  }

  lint(query, state, pick) {
    const found = this.found.get(query.name);
    const count = state === 'bad' ? int(found.rows) + (found.more ? '+' : '') : '';
    const words = { bad: plural(found?.rows ?? 0, 'row'), good: 'nothing', wait: 'not asked yet' };
    return this.item(
      query.name,
      query.title,
      `${query.meaning} (${found?.why ?? words[state]})`,
      pick,
      {
        attributes: { 'data-lint': state, 'data-old': found?.old ? 'true' : null },
        before: make('i', { class: 'glyph', text: GLYPH[state] }),
        after: make('b', { class: 'num', text: count }),
      },
    );
  }

  stateOf({ name }) {
    return this.found.get(name)?.state ?? 'wait';
  }

  // Asks every lint about the window; a newer call ends an older one.
  async ask(asker, bodyOf, signal) {
    for (const found of this.found.values()) found.old = true;
    const waiting = this.queries.filter(({ kind }) => kind === 'lint');
    const next = async () => {
      while (waiting.length && !signal.aborted) {
        const query = waiting.shift();
        const found = await outcome(asker, query, bodyOf(query), signal);
        if (signal.aborted) return;
        this.found.set(query.name, found);
        this.draw();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, next));
  }

  forget() {
    this.found.clear();
    this.draw();
  }
}

async function outcome(asker, query, body, signal) {
  try {
    const { row_count, truncated } = await asker.named(query.name, body, { signal });
    return { state: row_count ? 'bad' : 'good', rows: row_count, more: truncated };
  } catch (error) {
    return { state: 'error', rows: 0, why: error.message };
  }
}
