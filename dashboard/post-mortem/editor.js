// Owns: the SQL editor: a text field over its own coloured copy, completion at the caret, and the
// mark at an error. Called by: console.js. The list of offers is a listbox that the field names as
// its active descendant, so that a screen reader follows the arrow keys.

import { make, put } from '../dom.js';
import { placeOf } from './place.js';
import { suggest } from './suggest.js';
import { tokens } from './tokens.js';

const ROWS_LEAST = 5;
const ROWS_MOST = 22;

export class Editor {
  constructor({ onRun, onEdit }) {
    Object.assign(this, { onRun, onEdit });
    this.schema = null;
    this.wrong = null;
    this.offered = null;
    this.at = 0;
    this.copy = make('pre', { 'aria-hidden': 'true' });
    this.list = make('ul', { id: 'sql-offers', class: 'offers', role: 'listbox', hidden: true });
    this.list.setAttribute('aria-label', 'Completions');
    this.input = make('textarea', {
      spellcheck: 'false',
      autocapitalize: 'off',
      autocomplete: 'off',
      'aria-label': 'SQL',
      'aria-autocomplete': 'list',
      'aria-controls': 'sql-offers',
      oninput: () => this.edited(),
      onkeydown: (e) => this.key(e),
      onblur: () => this.close(),
      onclick: () => this.close(),
      onscroll: () => this.follow(),
    });
    this.element = make('div', { class: 'editor mono' }, this.copy, this.input, this.list);
  }

  get text() {
    return this.input.value;
  }

  set text(sql) {
    this.input.value = sql;
    this.wrong = null;
    this.close();
    this.paint();
  }

  edited() {
    this.wrong = null;
    this.paint();
    this.offer(false);
    this.onEdit(this.text);
  }

  // Marks the word at which the server stumbled; says its place.
  mark(position) {
    this.wrong = placeOf(this.text, position);
    this.paint();
    if (this.wrong) this.input.setSelectionRange(this.wrong.index, this.wrong.index);
    return this.wrong;
  }

  insert(text) {
    const { selectionStart: from, selectionEnd: to } = this.input;
    this.replace(from, to, text);
  }

  replace(from, to, text) {
    this.input.focus();
    this.input.setRangeText(text, from, to, 'end');
    this.edited();
    this.close();
  }

  paint() {
    const { index, length } = this.wrong ?? { index: -1, length: 0 };
    const spans = tokens(this.text).map(({ kind, text, at }) => {
      const wrong = index >= at && index < at + text.length;
      if (wrong && kind === 'space') return make('mark', { text });
      const span = make(wrong ? 'mark' : 'span', { class: 'q-' + kind, text });
      return kind === 'space' || (kind === 'other' && !wrong) ? text : span;
    });
    const end = index >= this.text.length && length === 0 && this.wrong;
    put(this.copy, spans, end && make('mark', { text: ' ' }));
    this.copy.append('\n');
    const lines = this.text.split('\n').length;
    this.input.rows = Math.min(ROWS_MOST, Math.max(ROWS_LEAST, lines));
    this.follow();
  }

  follow() {
    this.copy.scrollTop = this.input.scrollTop;
    this.copy.scrollLeft = this.input.scrollLeft;
  }

  // ---- completion

  offer(asked) {
    const { selectionStart: caret, selectionEnd } = this.input;
    const found = caret === selectionEnd ? suggest(this.text, caret, this.schema, { asked }) : null;
    this.offered = found;
    if (!found) {
      this.close();
      return;
    }
    this.at = 0;
    put(
      this.list,
      found.offers.map(({ text, kind, note }, i) =>
        make(
          'li',
          {
            id: `sql-offer-${i}`,
            role: 'option',
            'data-kind': kind,
            onpointerdown: (e) => {
              e.preventDefault();
              this.take(i);
            },
          },
          make('b', { text }),
          make('span', { text: note }),
        ),
      ),
    );
    this.list.hidden = false;
    this.settle(caret);
    this.point();
  }

  // Under the caret: characters are equally wide and lines equally high.
  settle(caret) {
    const before = this.text.slice(0, this.offered.from);
    const style = getComputedStyle(this.input);
    const high = parseFloat(style.lineHeight);
    this.wide ??= this.measure(style);
    const line = this.text.slice(0, caret).split('\n').length;
    const column = before.length - before.lastIndexOf('\n') - 1;
    const left = parseFloat(style.paddingLeft) + column * this.wide - this.input.scrollLeft;
    const most = this.element.clientWidth - this.list.offsetWidth - 8;
    this.list.style.left = Math.max(0, Math.min(left, most)) + 'px';
    const top = parseFloat(style.paddingTop) + line * high - this.input.scrollTop;
    this.list.style.top = top + 2 + 'px';
  }

  measure(style) {
    const context = document.createElement('canvas').getContext('2d');
    context.font = `${style.fontSize} ${style.fontFamily}`;
    return context.measureText('m'.repeat(40)).width / 40;
  }

  point() {
    [...this.list.children].forEach((item, i) =>
      item.setAttribute('aria-selected', String(i === this.at)),
    );
    this.list.children[this.at]?.scrollIntoView({ block: 'nearest' });
    this.input.setAttribute('aria-activedescendant', `sql-offer-${this.at}`);
  }

  take(i) {
    const { from, word, offers } = this.offered;
    this.replace(from, from + word.length, offers[i].text);
  }

  close() {
    this.list.hidden = true;
    this.offered = null;
    this.input.removeAttribute('aria-activedescendant');
  }

  key(e) {
    if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) {
      e.preventDefault();
      this.close();
      this.onRun();
      return;
    }
    if (e.key === ' ' && e.ctrlKey) {
      e.preventDefault();
      this.offer(true);
      return;
    }
    if (!this.offered) return;
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    if (moves[e.key]) {
      const n = this.offered.offers.length;
      this.at = (this.at + moves[e.key] + n) % n;
      this.point();
    } else if (e.key === 'Tab' || e.key === 'Enter') this.take(this.at);
    else if (e.key === 'Escape') this.close();
    else return;
    e.preventDefault();
    e.stopPropagation();
  }
}
