// Owns: the KV map: every block of the pool as a cell by who holds it, and the largest holders by
// name. Called by: the pages at 8 Hz, for now or for the iteration under the cursor.
// A sequence that ended in the iteration has given its blocks back, so it is no holder.

import { make, put, surface, write } from '../dom.js';
import { int, percent } from '../format.js';
import { KIND, isSlice } from './kinds.js';

const HOLDERS = 4;
const COLUMNS = 40;
const ROWS_MAX = 14;
const ENDS = new Set([KIND.FINISH, KIND.CANCEL, KIND.ERROR]);

// Holders of an iteration, largest first: [request, blocks], and what its rows do not hold
// ([null, blocks]): sequences that did not run in it.
export function holders(columns, index) {
  const held = new Map();
  for (let k = 0; k < columns.ops(index); k++) {
    const op = columns.op(index, k);
    if (isSlice(columns.opKind[op])) held.set(columns.opRequest[op], columns.opBlocks[op]);
    else if (ENDS.has(columns.opKind[op])) held.delete(columns.opRequest[op]);
  }
  const out = [...held];
  const rest = columns.kv_blocks_used[columns.slot(index)] - out.reduce((sum, [, n]) => sum + n, 0);
  if (rest > 0) out.push([null, rest]);
  return out.sort((a, b) => b[1] - a[1]);
}

export class KvMap {
  constructor({ onPick, onHover }) {
    this.canvas = make('canvas', { role: 'img', 'aria-label': 'KV blocks by holder' });
    this.when = make('span', { class: 'when' });
    this.figures = ['used', 'cached', 'free'].map((name) => {
      const value = make('b');
      const key = make('i', { class: 'key ' + name });
      return { value, element: make('span', {}, key, name, value) };
    });
    this.rows = Array.from({ length: HOLDERS }, () => holderRow(onPick, onHover));
    this.element = make(
      'section',
      { class: 'panel' },
      make('h2', {}, 'KV blocks', this.when),
      this.canvas,
      make(
        'div',
        { class: 'kv-figures' },
        this.figures.map((f) => f.element),
      ),
      make(
        'div',
        { class: 'holders' },
        this.rows.map((r) => r.element),
      ),
    );
  }

  clear() {
    for (const figure of this.figures) write(figure.value, '');
    for (const row of this.rows) row.element.hidden = true;
    this.canvas.getContext('2d').clearRect(0, 0, this.canvas.width, this.canvas.height);
  }

  measure() {
    this.width = this.element.clientWidth - 28;
  }

  // The pool now, or at the iteration under the cursor when `past`.
  update(store, index, colours, { selected, hovered, past }) {
    const { columns } = store,
      s = columns.slot(index),
      total = store.run.kv_blocks_total;
    const then = { used: columns.kv_blocks_used[s], cached: columns.kv_blocks_cached[s] };
    const { used, cached } = past ? then : store.present();
    const held = used ? holders(columns, index) : [];
    write(this.when, past ? 'at cursor' : '');
    this.draw({ held, used, cached, total }, colours, (id) => id === selected || id === hovered);
    [used, cached, total - used - cached].forEach((n, i) => write(this.figures[i].value, int(n)));
    this.rows.forEach((row, i) => {
      const [id, blocks] = held[i] || [];
      row.id = id;
      row.element.hidden = !blocks;
      if (!blocks) return;
      write(row.name, id === null ? 'not in step' : store.name(id));
      write(row.blocks, int(blocks));
      write(row.share, percent(blocks / total));
      row.element.classList.toggle('on', id !== null && id === selected);
      row.fill.style.width = Math.max(1, (blocks / held[0][1]) * 100) + '%';
    });
  }

  draw({ held, used, cached, total }, c, isLit) {
    const { width } = this;
    if (!(width > 60)) return;
    const rows = Math.min(ROWS_MAX, Math.ceil(total / COLUMNS)),
      perCell = Math.max(1, Math.ceil(total / (COLUMNS * rows)));
    const pitch = width / COLUMNS,
      size = Math.min(pitch, 9);
    const cells = Math.ceil(total / perCell);
    const ctx = surface(this.canvas, width, Math.ceil(cells / COLUMNS) * size);
    ctx.clearRect(0, 0, width, ROWS_MAX * size);
    let cell = 0,
      blocks = 0;
    const paint = (count, fill, dot) => {
      blocks += count;
      for (const end = Math.min(cells, Math.round(blocks / perCell)); cell < end; cell++) {
        const x = (cell % COLUMNS) * pitch,
          y = Math.floor(cell / COLUMNS) * size;
        ctx.fillStyle = fill;
        if (dot) ctx.fillRect(x + pitch / 2 - 1, y + size / 2 - 1, 2, 2);
        else ctx.fillRect(x, y, pitch - 1, size - 1);
      }
    };
    let room = used; // shared blocks count for each holder, but once in the pool
    held.forEach(([id, n], i) => {
      const own = Math.min(n, room);
      room -= own;
      paint(own, id !== null && isLit(id) ? c.text : i % 2 ? c.usedAlt : c.used, false);
    });
    paint(cached, c.pattern.cached, false);
    paint(total - used - cached, c.free, true);
  }
}

function holderRow(onPick, onHover) {
  const row = {
    id: null,
    name: make('span', { class: 'name' }),
    fill: make('i'),
    blocks: make('span', { class: 'num' }),
    share: make('span', { class: 'num faint' }),
  };
  row.element = make(
    'button',
    {
      class: 'holder',
      hidden: true,
      onclick: () => row.id !== null && onPick(row.id),
      onmouseenter: () => onHover(row.id),
      onmouseleave: () => onHover(null),
    },
    row.name,
    make('span', { class: 'meter' }, row.fill),
    row.blocks,
    row.share,
  );
  return row;
}
