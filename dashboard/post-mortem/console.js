// Owns: one question and its answer: a named query with its parameters as inputs, or free SQL; the
// editor, the schema beside it, the chart, the table, CSV. Called by: page.js, which keeps what is
// asked in the address. One question is under way at a time; a newer one ends it.

import { make, put, write } from '../dom.js';
import { int, plural } from '../format.js';
import { chartOf } from './chart.js';
import { csv } from './csv.js';
import { Editor } from './editor.js';
import { bodyOf, faultOf, inputsOf } from './inputs.js';
import { Plot } from './plot.js';
import { SchemaPanel } from './schema.js';
import { Table } from './table.js';

export const FIRST_SQL = `SELECT admission_stop, count(*) AS steps,
       round(sum(end_at_ns - begin_at_ns) / 1e9, 3) AS seconds
FROM iteration GROUP BY admission_stop ORDER BY seconds DESC`;

export class Console {
  // on: {edit(sql), values(values), free(sql)}; place() -> {from_us, to_us, run}
  constructor({ asker, place, on }) {
    Object.assign(this, { asker, place, on });
    this.query = null;
    this.answer = null;
    this.title = make('h1');
    this.meaning = make('p', { class: 'muted' });
    this.fields = make('div', { class: 'pm-fields' });
    this.runs = make('button', { class: 'primary', onclick: () => this.execute() }, 'Run ');
    this.runs.append(make('kbd', { text: 'Ctrl ⏎' }));
    this.editor = new Editor({ onRun: () => this.execute(), onEdit: (sql) => this.edited(sql) });
    // A named query speaks by its name; its SQL is there to be read and edited.
    this.written = make('details', { class: 'written' }, make('summary', { text: 'SQL' }));
    this.written.append(this.editor.element);
    this.status = make('div', { class: 'pm-status', role: 'status' });
    this.plot = new Plot();
    this.table = new Table();
    this.schema = new SchemaPanel({ onPick: (name) => this.editor.insert(name) });
    this.element = make(
      'div',
      { class: 'console' },
      make(
        'div',
        { class: 'console-main' },
        make(
          'header',
          { class: 'pm-head' },
          make('div', { class: 'pm-title' }, this.title, this.meaning),
          this.runs,
        ),
        this.fields,
        this.written,
        this.status,
        this.plot.element,
        this.table.element,
      ),
      this.schema.element,
    );
  }

  theme(colours) {
    this.plot.theme(colours);
  }

  describe(schema) {
    this.editor.schema = schema;
    this.schema.show(schema);
  }

  // Shows a named query, or free SQL where query is null, and asks it.
  show(query, { values, sql }) {
    const same = query === this.query && (query || sql === this.editor.text);
    this.query = query;
    this.inputs = query ? inputsOf(query, values) : [];
    write(this.title, query ? query.title : 'SQL');
    const free = 'Any one SELECT over the tables at the right. Ctrl Space offers names.';
    write(this.meaning, query ? query.meaning : free);
    if (!same) {
      this.editor.text = query ? query.sql : (sql ?? FIRST_SQL);
      this.editor.input.readOnly = false;
      this.clear();
    }
    if (!same) this.written.open = !query;
    this.drawFields();
    this.execute();
  }

  drawFields() {
    const before = document.activeElement?.dataset?.parameter;
    put(
      this.fields,
      this.inputs.map((input) =>
        make(
          'label',
          { title: input.doc },
          make('code', { text: input.name }),
          make('input', {
            type: input.kind,
            value: input.value,
            step: input.kind === 'number' && input.step,
            min: input.min,
            max: input.max,
            placeholder: input.placeholder,
            'data-parameter': input.name,
            onchange: () => this.changed(),
            onkeydown: (e) => e.key === 'Enter' && this.changed(),
          }),
        ),
      ),
    );
    this.fields.hidden = !this.inputs.length;
    if (before) this.field(before)?.focus();
  }

  field(name) {
    return this.fields.querySelector(`[data-parameter="${CSS.escape(name)}"]`);
  }

  values() {
    return Object.fromEntries(this.inputs.map(({ name }) => [name, this.field(name).value]));
  }

  changed() {
    const values = this.values();
    const told = this.inputs.filter(({ name }) => values[name] !== this.plain(name));
    this.on.values(Object.fromEntries(told.map(({ name }) => [name, values[name]])));
    this.execute();
  }

  plain(name) {
    return inputsOf(this.query).find((input) => input.name === name).value;
  }

  // A named query that was edited is free SQL from then on.
  edited(sql) {
    if (this.query) {
      this.query = null;
      this.inputs = [];
      write(this.title, 'SQL');
      write(this.meaning, 'Edited from a named query: its $parameters need values of their own.');
      this.drawFields();
    }
    this.on.edit(sql);
  }

  fault() {
    const values = this.values();
    for (const input of this.inputs) {
      const why = faultOf(input, values[input.name]);
      this.field(input.name).setAttribute('aria-invalid', String(why !== null));
      if (why) return why;
    }
    return this.query || this.editor.text.trim() ? null : 'There is no SQL to run.';
  }

  async execute() {
    const why = this.fault();
    if (why) {
      this.fail({ message: why });
      return;
    }
    this.abort?.abort();
    const { signal } = (this.abort = new AbortController());
    const { query } = this;
    this.editor.mark(null);
    this.element.setAttribute('aria-busy', 'true');
    const stop = make('button', { class: 'quiet', text: 'Stop', onclick: () => this.stop() });
    put(this.status, make('span', { class: 'hush', text: 'Asking…' }), stop);
    try {
      const answer = query
        ? await this.asker().named(query.name, bodyOf(query, this.values(), this.place()), {
            signal,
          })
        : await this.asker().sql(this.editor.text, [], { signal });
      if (!signal.aborted) this.shown(answer, query);
    } catch (error) {
      if (!signal.aborted) this.fail(error);
    }
  }

  leave() {
    this.abort?.abort();
  }

  // The server ends a query whose reader has left.
  stop() {
    this.abort?.abort();
    this.element.removeAttribute('aria-busy');
    put(this.status, make('span', { class: 'hush', text: 'Stopped.' }));
    this.clear();
  }

  clear() {
    this.answer = null;
    this.plot.show(null);
    this.table.clear();
  }

  fail(error) {
    this.element.removeAttribute('aria-busy');
    const place = this.query ? null : this.editor.mark(error.position ?? null);
    const where = place ? `line ${place.line}, column ${place.column}: ` : '';
    const head = make('b', { text: `■ ${where}` });
    put(this.status, make('p', { class: 'bad' }, head, error.message));
    this.clear();
  }

  shown(answer, query) {
    this.element.removeAttribute('aria-busy');
    this.answer = answer;
    const model = chartOf(answer, query?.chart ?? null, query?.unit);
    this.plot.show(model, query?.unit ?? '');
    const nothing =
      query?.kind === 'lint' || query?.kind === 'law'
        ? 'Nothing: this window is in order.'
        : 'No rows: nothing of this kind is in the window.';
    this.table.show(answer, nothing);
    put(
      this.status,
      make('b', { text: plural(answer.row_count, 'row') }),
      make('span', { class: 'muted', text: `${answer.elapsed_ms.toFixed(1)} ms` }),
      answer.truncated &&
        make('span', {
          class: 'warn',
          text: `▲ only the first ${int(answer.row_count)}: narrow the question for the rest`,
        }),
      make('span', { class: 'spacer' }),
      query && make('button', { class: 'quiet', text: 'Edit as SQL', onclick: () => this.free() }),
      make('button', { class: 'quiet', text: 'CSV', onclick: () => this.save() }),
    );
  }

  // A named query with its values written in, as SQL of one's own.
  free() {
    const body = bodyOf(this.query, this.values(), this.place());
    const written = this.query.sql.replace(/\$([a-z][a-z0-9_]*)/g, (_, name) => {
      const { default: otherwise } = this.query.parameters.find((one) => one.name === name);
      const value = body[name] ?? otherwise;
      if (value === null) return 'NULL';
      return typeof value === 'string' ? `'${value.replaceAll("'", "''")}'` : String(value);
    });
    this.on.free(written);
  }

  save() {
    const blob = new Blob([csv(this.answer)], { type: 'text/csv' });
    const link = make('a', {
      href: URL.createObjectURL(blob),
      download: `${this.query?.name ?? 'answer'}.csv`,
    });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
