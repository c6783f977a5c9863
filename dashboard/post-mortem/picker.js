// Owns: the bar above a post-mortem: whose record (this server's or a recorded file), which run,
// the window's two instants, its length, and links that say the same elsewhere. Called by: page.js.

import { make, put } from '../dom.js';
import { int, timeOfDay } from '../format.js';
import { LENGTHS } from './window.js';

const two = (n) => String(n).padStart(2, '0');

// An instant as a field for local time has it, to the millisecond; and back.
export function localText(us) {
  const d = new Date(us / 1e3);
  const day = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
  return `${day}T${timeOfDay(0, us, 3)}`;
}
export const localUs = (text) => Date.parse(text) * 1e3;

export class Picker {
  // on: {file(name), run(id), window([from, to]), length(us), move(share), send(file)}
  constructor(on) {
    this.on = on;
    this.file = make('select', {
      'aria-label': 'Whose record',
      onchange: () => on.file(this.file.value || null),
    });
    this.run = make('select', { 'aria-label': 'Run', onchange: () => on.run(this.run.value) });
    const instant = (words) =>
      make('input', {
        type: 'datetime-local',
        step: '0.001',
        'aria-label': words,
        onchange: () => this.typed(),
      });
    this.from = instant('From');
    this.to = instant('To');
    this.upload = make('input', {
      type: 'file',
      class: 'unseen',
      accept: '.duckdb',
      tabindex: -1,
      'aria-label': 'A recorded file',
      onchange: () => {
        const [file] = this.upload.files;
        if (file) on.send(file);
        this.upload.value = '';
      },
    });
    this.lengths = LENGTHS.map(([us, text]) =>
      make('button', {
        class: 'quiet',
        text,
        title: `The ${text} that end here`,
        onclick: () => on.length(us),
      }),
    );
    this.lengthsElement = make(
      'span',
      { class: 'lengths', role: 'group', 'aria-label': 'Length' },
      this.lengths,
    );
    this.copied = make('span', { class: 'faint', role: 'status' });
    this.element = this.row(on);
  }

  row(on) {
    const button = (text, title, onclick) =>
      make('button', { class: 'quiet', text, title, 'aria-label': title, onclick });
    return make(
      'div',
      { class: 'picker' },
      this.file,
      button('Open a file…', 'Look at a recorded .duckdb file', () => this.upload.click()),
      this.upload,
      this.run,
      make(
        'span',
        { class: 'picker-window' },
        button('‹', 'Half a window back', () => on.move(-0.5)),
        this.from,
        make('span', { text: '–' }),
        this.to,
        button('›', 'Half a window on', () => on.move(0.5)),
      ),
      make('span', { class: 'spacer' }),
      this.copied,
      button('Copy link', 'Copy a link to this view', () => on.copy()),
      button('Compare with before', 'Compare this window with the one before it', () =>
        on.compare(),
      ),
    );
  }

  files(listed, chosen) {
    const options = [make('option', { value: '', text: 'This server’s history' })];
    const group = (label, sent) => {
      const found = listed.filter((file) => file.sent === sent);
      if (!found.length) return;
      const each = found.map(({ name, bytes }) =>
        make('option', { value: name, text: `${fileWords(name)} · ${int(bytes / 1024)} KiB` }),
      );
      options.push(make('optgroup', { label }, each));
    };
    group('Recorded here', false);
    group('Brought here', true);
    if (chosen && !listed.some(({ name }) => name === chosen)) {
      options.push(make('option', { value: chosen, text: `${chosen} (not here)` }));
    }
    put(this.file, options);
    this.file.value = chosen ?? '';
  }

  runs(runs, chosen) {
    put(
      this.run,
      runs.map(({ run_id, started_unix_us, last_us, model }) =>
        make('option', {
          value: run_id,
          title: run_id,
          text: `${dayWords(started_unix_us)}–${timeOfDay(0, last_us)} · ${model ?? ''}`,
        }),
      ),
    );
    this.run.value = chosen ?? '';
    this.run.disabled = !runs.length;
  }

  window(window) {
    for (const [field, us] of [
      [this.from, window?.[0]],
      [this.to, window?.[1]],
    ]) {
      field.disabled = us === undefined;
      if (us !== undefined && document.activeElement !== field) field.value = localText(us);
    }
    this.lengths.forEach((button, i) => {
      const same = window && Math.abs(window[1] - window[0] - LENGTHS[i][0]) < 1e3;
      button.setAttribute('aria-pressed', String(Boolean(same)));
    });
  }

  typed() {
    const asked = [localUs(this.from.value), localUs(this.to.value)];
    const whole = asked.every(Number.isFinite) && asked[0] < asked[1];
    for (const field of [this.from, this.to]) field.setAttribute('aria-invalid', String(!whole));
    if (whole) this.on.window(asked);
  }

  say(words) {
    this.copied.textContent = words;
  }
}

const dayWords = (us) => `${new Date(us / 1e3).toLocaleDateString('en-CA')} ${timeOfDay(0, us)}`;

// '20261130T062341.651427-slo.duckdb' -> '06:23:41 slo': when it was made, and why.
export function fileWords(name) {
  const found = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)\.\d+-(.+)\.duckdb$/.exec(name);
  if (!found) return name;
  const [, year, month, day, hour, minute, second, why] = found;
  const us = Date.UTC(year, month - 1, day, hour, minute, second) * 1e3;
  return `${dayWords(us)} ${why}`;
}
