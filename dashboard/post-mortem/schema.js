// Owns: the schema beside the SQL editor: each table with what a row is, each column with its type,
// unit and meaning; a click writes the name at the caret. Called by: console.js.

import { make, put } from '../dom.js';
import { tablesOf } from './suggest.js';

export class SchemaPanel {
  constructor({ onPick }) {
    this.onPick = onPick;
    this.find = make('input', {
      type: 'search',
      placeholder: 'find a column',
      'aria-label': 'Find a column',
      oninput: () => this.filter(),
    });
    this.list = make('div');
    this.element = make(
      'aside',
      { class: 'schema', 'aria-label': 'Schema' },
      make('h2', { text: 'Schema' }),
      this.find,
      this.list,
    );
  }

  show(schema) {
    this.schema = schema;
    this.filter();
  }

  filter() {
    const word = this.find.value.trim().toLowerCase();
    const parts = Object.entries(tablesOf(this.schema)).map(([table, { doc, columns }]) => {
      const hit = (column) => `${table}.${column.name} ${column.doc}`.toLowerCase().includes(word);
      const shown = word ? columns.filter(hit) : columns;
      if (!shown.length) return null;
      return make(
        'details',
        { open: Boolean(word) },
        make(
          'summary',
          { title: doc },
          make('code', { text: table }),
          make('span', { class: 'faint', text: String(shown.length) }),
        ),
        make('p', { class: 'faint', text: doc }),
        shown.map((column) => this.column(column)),
      );
    });
    put(this.list, parts);
  }

  column({ name, type, unit, doc, values }) {
    const words = [doc, unit && `in ${unit}`, values.length && `one of ${values.join(', ')}`];
    return make(
      'button',
      { title: words.filter(Boolean).join('; '), onclick: () => this.onPick(name) },
      make('code', { text: name }),
      make('span', { class: 'faint', text: type.toLowerCase() + (unit ? ' ' + unit : '') }),
    );
  }
}
