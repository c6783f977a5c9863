// Owns: one horizontal band drawn on canvas tiles. A tile covers 480 px of world time, is painted
// once, iteration by iteration, and then only slides (a CSS transform on the scroller), so a frame
// costs the new columns, never the window. Called by: score.js and lanes.js.
// Painters get x in the tile's own pixels: canvas and compositor compute in 32-bit floats, which
// hold no world coordinate of a page that has been open for a day.

const TILE = 480; // a multiple of every hatch's period, so that seams do not show
const SPILL = 14; // px that a mark may stick out of its column
const SPARE_MAX = 8;
const REBASE_PX = 1 << 20;

export class Track {
  // paint(ctx, index, box) draws a column; late(ctx, index, box, from) the things noted in it
  // since. box = {x0, x1, height, origin}: edges and the tile's left edge in world px.
  constructor({ host, view, paint, late = null }) {
    Object.assign(this, { host, view, paint, late });
    this.scroller = document.createElement('div');
    this.scroller.className = 'scroller';
    host.append(this.scroller);
    this.tiles = new Map();
    this.spare = [];
    this.height = 0;
    this.base = 0; // world px of the scroller's zero
  }

  resize(height) {
    if (height === this.height) return;
    this.height = height;
    this.invalidate();
  }

  invalidate() {
    for (const tile of this.tiles.values()) this.retire(tile);
    this.tiles.clear();
  }

  retire(tile) {
    tile.canvas.remove();
    if (this.spare.length < SPARE_MAX) this.spare.push(tile);
  }

  frame(columns) {
    if (!this.height) return;
    const { view } = this,
      { offset } = view;
    if (Math.abs(offset - this.base) > REBASE_PX) {
      this.invalidate();
      this.base = Math.floor(offset / TILE) * TILE;
    }
    const from = Math.floor(offset / TILE),
      to = Math.floor((offset + view.width) / TILE);
    for (const [at, tile] of this.tiles) {
      if (at >= from - 1 && at <= to + 1) continue;
      this.retire(tile);
      this.tiles.delete(at);
    }
    for (let at = Math.max(0, from); at <= to; at++) this.fill(this.tile(at, columns), at, columns);
    const ratio = window.devicePixelRatio || 1;
    const shift = Math.round((offset - this.base) * ratio) / ratio;
    this.scroller.style.transform = `translate3d(${-shift}px,0,0)`;
  }

  tile(at, columns) {
    const present = this.tiles.get(at);
    if (present) return present;
    const tile = this.spare.pop() || { canvas: document.createElement('canvas') };
    const ratio = window.devicePixelRatio || 1;
    tile.canvas.width = Math.ceil(TILE * ratio); // setting the size also clears
    tile.canvas.height = Math.max(1, Math.round(this.height * ratio));
    const { style } = tile.canvas;
    style.width = TILE + 'px';
    style.height = this.height + 'px';
    style.left = at * TILE - this.base + 'px';
    tile.ctx = tile.ctx || tile.canvas.getContext('2d');
    tile.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    tile.next = columns.find(((at * TILE - SPILL) / this.view.scale) * 1e9);
    tile.seen = -1; // things drawn of the column before `next`
    this.tiles.set(at, tile);
    this.scroller.append(tile.canvas);
    return tile;
  }

  fill(tile, at, columns) {
    const origin = at * TILE;
    this.catchUp(tile, origin, columns);
    while (tile.next < columns.count) {
      if (tile.next < columns.first) tile.next = columns.first;
      const box = this.box(tile.next, origin, columns);
      if (this.begins(tile.next, box, columns) >= TILE + SPILL) return;
      this.paint(tile.ctx, tile.next, box);
      tile.seen = columns.ops(tile.next);
      tile.next++;
    }
  }

  // Where a column begins to show: a hole before it is drawn with it.
  begins(index, { x0, origin }, columns) {
    if (!columns.hole[columns.slot(index)] || !columns.has(index - 1)) return x0;
    return this.snap(columns.end_at_ns[columns.slot(index - 1)], origin);
  }

  // Marks that came after their column was painted: an end follows its iteration.
  catchUp(tile, origin, columns) {
    const index = tile.next - 1;
    if (!this.late || tile.seen < 0 || !columns.has(index)) return;
    const now = columns.ops(index);
    if (now <= tile.seen) return;
    this.late(tile.ctx, index, this.box(index, origin, columns), tile.seen);
    tile.seen = now;
  }

  box(index, origin, columns) {
    const s = columns.slot(index);
    return {
      x0: this.snap(columns.begin_at_ns[s], origin),
      x1: this.snap(columns.end_at_ns[s], origin),
      height: this.height,
      origin,
    };
  }

  snap(ns, origin) {
    const ratio = window.devicePixelRatio || 1;
    return Math.round((this.view.world(ns) - origin) * ratio) / ratio;
  }
}
