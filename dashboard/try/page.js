// Owns: the Try view: a prompt box with its answer, and the traffic generator's form and figures.
// Called by: main.js through the table of pages. Where the server does not let its page send, it
// says so and how to change it, and offers nothing.

import { make, put, write } from '../dom.js';
import { int, plural } from '../format.js';
import { LIMITS, PRESETS, checked } from './schedule.js';

const FIELDS = [
  ['rate', 'Arrivals', 'a Poisson stream'],
  ['prompt', 'Prompt length', 'median; log-normal'],
  ['output', 'Output length', 'median; log-normal, end tokens ignored'],
  ['every', 'Burst every', '0 for none'],
  ['burst', 'Burst of', 'at once, of the lengths above'],
  ['long', 'or one long prompt of', '0 for a burst'],
];
const PRESET_WORDS = {
  steady: 'Steady',
  bursts: 'Bursts',
  bully: 'A long prompt among short ones',
  flood: 'More than it can serve',
};

export class TryPage {
  // box is the prompt box (an element, `focus`, `update`); generator a Generator.
  constructor({ box, generator, allowed }) {
    Object.assign(this, { box, generator });
    this.element = make('div', { class: 'traffic' }, make('h1', { text: 'Try it' }));
    this.allow(allowed);
  }

  // Whether the server lets its page send: known a moment after the page opened.
  allow(allowed) {
    if (allowed === this.allowed) return;
    this.allowed = allowed;
    const heading = this.element.firstChild;
    if (allowed) put(this.element, heading, this.build());
    else put(this.element, heading, refusal(allowed));
    if (allowed) this.fill(PRESETS.steady);
  }

  build() {
    this.inputs = new Map();
    const rows = FIELDS.map(([name, label, note]) => this.field(name, label, note));
    const presets = Object.entries(PRESET_WORDS).map(([name, text]) =>
      make('button', {
        type: 'button',
        class: 'quiet',
        text,
        onclick: () => this.fill(PRESETS[name]),
      }),
    );
    this.startButton = make('button', { class: 'primary', text: 'Start' });
    this.clearButton = make('button', {
      type: 'button',
      class: 'quiet',
      text: 'Cancel what is in flight',
      onclick: () => this.generator.clear(),
    });
    this.seed = make('input', { id: 'try-seed', type: 'number', min: 0, step: 1, value: 1 });
    this.said = make('p', { class: 'try-said', role: 'status' });
    this.figures = make('dl', { class: 'try-figures' });
    const seed = this.row('try-seed', 'Seed', this.seed, '', 'the same seed is the same day');
    const form = make(
      'form',
      { class: 'try-form', novalidate: true, onsubmit: (e) => this.submit(e) },
      make('div', { class: 'try-presets', role: 'group', 'aria-label': 'Presets' }, presets),
      make('div', { class: 'try-fields' }, rows, seed),
      make('div', { class: 'try-acts' }, this.startButton, this.clearButton),
      this.said,
    );
    return make(
      'div',
      { class: 'try-grid' },
      make('section', { class: 'try-panel' }, this.box.element),
      make(
        'section',
        { class: 'try-panel' },
        make('h2', { text: 'Traffic' }),
        make('p', {
          class: 'muted',
          text:
            'Made-up prompts at a rate, sent by the server to itself, so that their arrivals do ' +
            'not wait for the browser. It goes on while you look at Live, and stops with this tab.',
        }),
        form,
        this.figures,
      ),
    );
  }

  field(name, label, note) {
    const { min, max, step, unit } = LIMITS[name];
    const id = 'try-' + name;
    const input = make('input', { id, type: 'number', min, max, step, inputmode: 'decimal' });
    input.addEventListener('input', () => this.check());
    this.inputs.set(name, input);
    return this.row(id, label, input, unit, note);
  }

  row(id, label, input, unit, note) {
    input.setAttribute('aria-describedby', id + '-note');
    return make(
      'div',
      { class: 'try-field' },
      make('label', { for: id, text: label }),
      input,
      make('span', { class: 'muted', text: unit }),
      make('small', { id: id + '-note', text: note }),
    );
  }

  fill(settings) {
    for (const [name, input] of this.inputs) input.value = settings[name];
    this.check();
  }

  check() {
    const given = Object.fromEntries([...this.inputs].map(([name, { value }]) => [name, value]));
    const { settings, wrong } = checked(given);
    for (const [name, input] of this.inputs) {
      input.setAttribute('aria-invalid', String(wrong.includes(name)));
    }
    const [first] = wrong;
    const label = first && FIELDS.find(([name]) => name === first)[1];
    const { min, max } = first ? LIMITS[first] : {};
    write(this.said, first ? `${label} must lie within ${int(min)} and ${int(max)}.` : '');
    return wrong.length ? null : settings;
  }

  submit(e) {
    e.preventDefault();
    if (this.generator.running) {
      this.generator.stop();
      return;
    }
    const settings = this.check();
    if (settings) this.generator.start(settings, Math.max(0, Math.floor(Number(this.seed.value))));
  }

  // What the generator has to say; called when it changes.
  update() {
    if (!this.allowed) return;
    const { generator } = this;
    write(this.startButton, generator.running ? 'Stop' : 'Start');
    if (generator.error) write(this.said, generator.error);
    else if (this.check()) write(this.said, '');
    const { told } = generator;
    const answers = Object.entries(generator.answers() ?? {});
    const refused = answers.filter(([status]) => status !== '200');
    const rows = [
      ['sent', int(generator.sent)],
      ['in flight', told ? int(told.in_flight) : '–'],
      ['begun', int(generator.answers()?.[200] ?? 0)],
      ...refused.map(([status, count]) => [words(status), int(count)]),
    ];
    if (generator.skipped) rows.push(['not sent: too many at once', int(generator.skipped)]);
    if (told?.beyond) {
      rows.push([`beyond ${plural(told.in_flight_max, 'request')} in flight`, int(told.beyond)]);
    }
    put(
      this.figures,
      rows.flatMap(([name, value]) => [
        make('dt', { text: name }),
        make('dd', { class: 'num', text: value }),
      ]),
    );
  }

  enter() {
    if (!this.allowed) return;
    this.box.focus();
    this.update();
  }

  leave() {}

  theme() {}

  resize() {}

  frame() {
    if (this.allowed) this.box.update();
  }
}

function words(status) {
  const known = { 400: 'refused as bad (400)', 429: 'refused, queue full (429)' };
  return known[status] ?? `answered ${status}`;
}

function refusal(allowed) {
  if (allowed === null) return make('p', { class: 'muted', text: 'Asking the server …' });
  return make(
    'div',
    { class: 'try-refusal' },
    make('p', {
      text: 'This server does not let its page send prompts: others may be served by it.',
    }),
    make(
      'p',
      { class: 'muted' },
      'Whoever runs it may say so: ',
      make('code', { text: 'iterscope serve --try-it' }),
    ),
  );
}
