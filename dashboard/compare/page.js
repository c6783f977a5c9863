// Owns: the Compare view: which two sides, asking the server what changed between them, and showing
// it: a sentence, both scores on one scale, the waterfall, the figures. Called by: main.js through
// the table of pages. Both sides stand in the address, so a comparison is a link.

import { ask } from '../api.js';
import { make, put, write } from '../dom.js';
import { duration, plural, timeOfDay } from '../format.js';
import { instantText } from '../post-mortem/address.js';
import { Asker, objects } from '../post-mortem/asker.js';
import { RUNS } from '../post-mortem/overview.js';
import { fileWords } from '../post-mortem/picker.js';
import { addressOf } from '../router.js';
import { figures, notes, settings, verdict, waterfall } from './parts.js';
import { Picture, SHOWN_US, together } from './picture.js';
import { EMPTY, bodyOf, isWhole, pinned, readSides, writeSides } from './sides.js';

export class Compare {
  // app: {router}
  constructor(app) {
    this.app = app;
    this.sides = { a: EMPTY, b: EMPTY };
    this.result = null;
    this.whole = false; // both pictures are drawn
    this.pictures = { a: new Picture('A'), b: new Picture('B') };
    this.picks = { a: this.pickOf('a'), b: this.pickOf('b') };
    this.names = make('datalist', { id: 'cmp-runs' });
    const swap = make('button', {
      type: 'button', // Enter in a field compares; it does not swap
      class: 'quiet',
      text: '⇄',
      title: 'Swap the sides',
      'aria-label': 'Swap the sides',
      onclick: () => this.choose({ a: this.sides.b, b: this.sides.a }),
    });
    this.form = make(
      'form',
      {
        class: 'cmp-form',
        onsubmit: (e) => {
          e.preventDefault();
          this.choose({ a: this.typed('a'), b: this.typed('b') });
        },
      },
      this.picks.a.element,
      swap,
      this.picks.b.element,
      make('button', { class: 'primary', text: 'Compare' }),
      this.names,
    );
    this.verdict = make('div', { class: 'verdict', role: 'status' });
    this.foot = make('div', { class: 'cmp-foot' });
    this.scores = make(
      'div',
      { class: 'cmp-scores' },
      this.pictures.a.element,
      this.pictures.b.element,
    );
    this.body = make('div', { class: 'cmp-body' });
    this.element = make(
      'div',
      { class: 'compare' },
      make('h1', { class: 'unseen', text: 'Compare' }),
      this.form,
      this.body,
    );
  }

  pickOf(name) {
    const letter = name.toUpperCase();
    const file = make('select', { 'aria-label': `Record of ${letter}` });
    const text = make('input', {
      list: 'cmp-runs',
      spellcheck: 'false',
      placeholder: 'window or run: 10m/5m, last, …',
      'aria-label': `Window or run of ${letter}`,
    });
    const element = make(
      'div',
      { class: 'side-pick' },
      make('b', { class: 'ab', text: letter }),
      file,
      text,
    );
    return { file, text, element };
  }

  typed(name) {
    const { file, text } = this.picks[name];
    return { text: text.value.trim(), file: file.value || null };
  }

  // ---- what the router calls

  enter(params) {
    const sides = readSides(params);
    const asked = JSON.stringify(sides);
    const same = [this.sides, this.found].some((those) => JSON.stringify(those) === asked);
    if (!same) this.sides = sides;
    this.fill();
    this.list();
    if (!isWhole(sides.a) || !isWhole(sides.b)) this.blank();
    else if (!same || !this.result) this.compare();
  }

  leave() {
    if (this.whole) return;
    this.abort?.abort();
    this.result = null;
  }

  theme(colours) {
    for (const { score } of Object.values(this.pictures)) score.theme(colours);
  }

  resize() {
    for (const { score } of Object.values(this.pictures)) score.resize();
  }

  frame(now_ms, elapsed_ms) {
    if (!this.result) return;
    if (this.whole) together(Object.values(this.pictures));
    for (const { score } of Object.values(this.pictures)) score.frame(now_ms, elapsed_ms);
  }

  // ---- choosing

  choose(sides) {
    this.sides = sides;
    this.result = null;
    this.app.router.note(writeSides(sides), { replaces: true });
    this.fill();
    if (!isWhole(sides.a) || !isWhole(sides.b)) this.blank();
    else this.compare();
  }

  fill() {
    for (const name of ['a', 'b']) {
      const { file, text } = this.picks[name];
      pick(file, this.sides[name].file ?? '');
      text.value = this.sides[name].text;
    }
  }

  // The runs and files there are to choose from. They may come while somebody types: what stands in
  // the fields stays.
  async list() {
    try {
      const [runs, files] = await Promise.all([
        ask('POST', 'telemetry/sql', { sql: RUNS, parameters: [] }),
        ask('GET', 'telemetry/incidents'),
      ]);
      this.runs = objects(runs);
      const words = this.runs.map(({ run_id, started_unix_us, policy, batching }) =>
        make('option', {
          value: run_id,
          text: `${timeOfDay(0, started_unix_us)} ${policy ?? ''} ${batching ?? ''}`,
        }),
      );
      put(
        this.names,
        make('option', { value: 'last', text: 'the newest run' }),
        make('option', { value: 'previous', text: 'the run before it' }),
        make('option', { value: '10m/5m', text: 'from 10 to 5 minutes ago' }),
        words,
      );
      for (const { file } of Object.values(this.picks)) {
        const each = files.data.map(({ name }) =>
          make('option', { value: name, text: fileWords(name) }),
        );
        const chosen = file.value;
        put(file, make('option', { value: '', text: 'This server’s history' }), each);
        pick(file, chosen);
      }
      if (this.blanked) this.blank();
    } catch {
      // What can be typed can still be compared; the comparison says what is wrong.
    }
  }

  // ---- what is shown

  blank() {
    this.blanked = true;
    this.result = null;
    const offer = (text, a, b) =>
      make('button', {
        class: 'quiet',
        text,
        onclick: () => this.choose({ a: { ...EMPTY, text: a }, b: { ...EMPTY, text: b } }),
      });
    put(
      this.body,
      make(
        'div',
        { class: 'pm-blank' },
        make('h2', { text: 'Two sides, and what changed from A to B' }),
        make('p', {
          class: 'muted',
          text:
            'A side is a run, a window such as 15m/10m (from 15 to 10 minutes ago), two instants ' +
            'FROM/TO, or a recorded file. A change counts only if it is larger than what blocks ' +
            'of time differ by anyway.',
        }),
        make(
          'p',
          { class: 'offers-row' },
          this.runs?.length > 1 && offer('The previous run and this one', 'previous', 'last'),
          offer('Ten minutes in halves', '10m/5m', '5m/now'),
          offer('Two minutes in halves', '2m/1m', '1m/now'),
        ),
      ),
    );
  }

  async compare() {
    this.blanked = false;
    this.abort?.abort();
    const { signal } = (this.abort = new AbortController());
    this.result = null;
    this.whole = false;
    for (const { open } of Object.values(this.pictures)) open.hidden = true;
    put(
      this.body,
      make('div', { class: 'pm-blank', role: 'status' }, make('p', { text: 'Comparing…' })),
    );
    try {
      const result = await new Asker(ask).again(
        'POST',
        'telemetry/diff',
        bodyOf(this.sides),
        signal,
      );
      if (signal.aborted) return;
      this.result = result;
      this.show(result);
      this.pin(result);
      await this.draw(result, signal);
      if (!signal.aborted) this.whole = true;
    } catch (error) {
      if (!signal.aborted) this.fail(error);
    }
  }

  show(result) {
    const { level, head, body } = verdict(result);
    this.verdict.dataset.level = { worse: 'bad', better: 'good' }[level] ?? 'same';
    const glyph = { worse: '■', better: '●' }[level] ?? '○';
    put(
      this.verdict,
      make('span', { class: 'v-glyph', text: glyph }),
      make('b', { text: head }),
      make('span', { class: 'v-body', text: body }),
    );
    for (const name of ['a', 'b']) write(this.pictures[name].about, aboutWords(result[name]));
    const { diff } = result;
    put(this.foot, waterfall(diff), make('div', {}, figures(diff), settings(diff)));
    put(this.body, this.verdict, notes(diff), this.scores, this.foot);
    this.resize();
  }

  // What was said relative to now stands in the address as what it was: a link stays true.
  pin(result) {
    const { sides } = this;
    this.found = { a: pinned(sides.a, result.a), b: pinned(sides.b, result.b) };
    this.app.router.note(writeSides(this.found), { replaces: true });
  }

  // Both scores, on one scale.
  async draw({ a, b }, signal) {
    const length = Math.min(
      SHOWN_US,
      Math.max(...[a, b].map((s) => s.to_unix_us - s.from_unix_us)),
    );
    const about = { a, b };
    const one = async (name) => {
      const picture = this.pictures[name],
        { file } = this.sides[name];
      try {
        const shown = await picture.show(ask, file, about[name], length, signal);
        if (!shown) return;
        const whole_us = about[name].to_unix_us - shown.from_us;
        const part = shown.to_us - shown.from_us;
        const first = part < 0.98 * whole_us ? ` · its first ${duration(part / 1e3)} drawn` : '';
        write(picture.about, aboutWords(about[name]) + first);
        picture.open.href = addressOf('post-mortem', {
          file,
          run: shown.run,
          from: instantText(shown.from_us),
          to: instantText(shown.to_us),
        });
        picture.open.hidden = false;
      } catch (error) {
        if (!signal.aborted) picture.say(`The score could not be read: ${error.message}`);
      }
    };
    await Promise.all([one('a'), one('b')]);
    if (!signal.aborted) together(Object.values(this.pictures), { anew: true });
  }

  fail(error) {
    put(
      this.body,
      make(
        'div',
        { class: 'pm-blank', role: 'alert' },
        make('h2', { text: 'These two cannot be compared.' }),
        make('p', { class: 'muted', text: error.message }),
        error.status !== 400 &&
          make('button', { class: 'quiet', text: 'Try again', onclick: () => this.compare() }),
      ),
    );
  }
}

// Selects a recorded file, even one that is not on the list.
function pick(select, name) {
  if (name && ![...select.options].some((one) => one.value === name)) {
    select.append(make('option', { value: name, text: fileWords(name) }));
  }
  select.value = name;
}

function aboutWords({ runs, from_unix_us, to_unix_us, requests }) {
  const span = `${timeOfDay(0, from_unix_us)}–${timeOfDay(0, to_unix_us)}`;
  const more = runs.length > 1 ? ` · ${plural(runs.length, 'run')}` : '';
  return `${span} · ${plural(requests, 'request')} ended${more}`;
}
