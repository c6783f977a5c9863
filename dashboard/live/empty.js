// Owns: what the score says while there is nothing to draw, and the help sheet. Called by: page.js
// and main.js. Legend entries are drawn by the lanes' own functions.
// It must never show a command that would not work when pasted.

import { make, put, write } from '../dom.js';
import { KEYS } from '../keys.js';
import { entries, sample } from '../score/legend.js';

export class Empty {
  constructor() {
    this.head = make('h2');
    this.body = make('p', { class: 'muted' });
    this.command = make('pre', { class: 'mono', tabindex: 0 });
    this.how = make('div', { class: 'how' });
    this.element = make('div', { class: 'empty' }, this.head, this.body, this.command, this.how);
    this.drawn = null;
  }

  // state: 'connecting' | 'starting' | 'ready' | null (records are there)
  update(state, run, colours) {
    const key = state && `${state}/${run?.model}/${colours.bg}`;
    if (key === this.drawn) return;
    this.drawn = key;
    this.element.hidden = !state;
    if (!state) return;
    const [head, body] = {
      connecting: ['Connecting', 'Reading the snapshot; records follow.'],
      starting: ['The engine is starting', 'It loads the model, then this page comes to life.'],
      ready: [
        'Ready. No request has come yet.',
        'Send one, from the box at the right or so, and its lane appears at the next iteration:',
      ],
    }[state];
    write(this.head, head);
    write(this.body, body);
    this.command.hidden = state !== 'ready';
    if (state === 'ready') write(this.command, curl(run));
    put(this.how, words());
  }
}

function curl(run) {
  const body = JSON.stringify({ model: run.model, prompt: 'Once upon a time', max_tokens: 64 });
  const quoted = body.replaceAll("'", "'\\''");
  return (
    `curl ${location.origin}/v1/completions -H 'content-type: application/json' \\\n` +
    `  -d '${quoted}'`
  );
}

function words() {
  return [
    make('h2', { text: 'How to read the score' }),
    make('p', {
      class: 'muted',
      text:
        'Each lane is a request, time runs to the right, and each column is one pass of the ' +
        'model, as wide as the time it took. All lanes in a column share that pass: a request ' +
        'joins at the next column and leaves the moment it ends. That is continuous batching.',
    }),
  ];
}

function how(colours, run) {
  return make(
    'div',
    { class: 'how' },
    words(),
    make(
      'ul',
      { class: 'alphabet' },
      entries(run).map(([kind, name, sentence, amount]) =>
        make(
          'li',
          {},
          sample(colours, kind, amount, 44, 14),
          make('b', { text: name }),
          make('span', { class: 'muted', text: sentence }),
        ),
      ),
    ),
  );
}

export class Help {
  // colours and run are asked for when the sheet opens.
  constructor({ colours, run }) {
    Object.assign(this, { colours, run });
    this.element = make('dialog', { class: 'sheet', 'aria-label': 'Keys and marks' });
    this.element.addEventListener('click', (e) => e.target === this.element && this.close());
    document.body.append(this.element);
  }

  close() {
    if (!this.element.open) return false;
    this.element.close();
    return true;
  }

  toggle() {
    if (this.close()) return;
    put(
      this.element,
      make(
        'div',
        { class: 'sheet-card' },
        how(this.colours(), this.run()),
        make('div', {}, make('h2', { text: 'Keys' }), keys()),
      ),
    );
    this.element.showModal();
  }
}

function keys() {
  return make(
    'dl',
    { class: 'keys' },
    KEYS.flatMap(([key, words]) => [
      make('dt', {}, make('kbd', { text: key })),
      make('dd', { text: words }),
    ]),
  );
}
