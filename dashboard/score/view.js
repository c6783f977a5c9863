// Owns: the one window in time that every track shares, and the one cursor that joins them.
// Called by: score.js and gestures.js (write), every track (map). Pure: numbers in, numbers out.

export const ZOOM = { least: 16, most: 3000, step: 1.25, start: 170 }; // CSS px a second
const EASE_MS = 60;
const JUMP_NS = 3e9;

export class View {
  constructor() {
    this.width = 1000;
    this.scale = ZOOM.start;
    this.lead = 26; // px kept free right of the newest tile
    this.clear();
  }

  clear() {
    this.right = 0; // ns at the right edge
    this.follow = true;
    this.hold = false;
    this.cursor = null; // ns under the pointer
    this.pinned = null; // ns under the keyboard's cursor
    this.settled = false;
  }

  world(ns) {
    return (ns / 1e9) * this.scale;
  }
  get left() {
    return this.right - (this.width / this.scale) * 1e9;
  }
  get offset() {
    return this.world(this.right) - this.width;
  }
  x(ns) {
    return this.world(ns) - this.offset;
  }
  ns(x) {
    return ((x + this.offset) / this.scale) * 1e9;
  }

  // Following eases toward the edge instead of jumping a tile at a time.
  tick(edge_ns, elapsed_ms) {
    if (!this.follow || this.hold) return;
    const goal = edge_ns + (this.lead / this.scale) * 1e9;
    const distance = goal - this.right;
    this.settled = true;
    if (Math.abs(distance) > JUMP_NS) this.right = goal;
    else this.right += distance * (1 - Math.exp(-elapsed_ms / EASE_MS));
  }

  zoom(factor, x = this.width) {
    const anchor = this.ns(x);
    const scale = Math.min(ZOOM.most, Math.max(ZOOM.least, this.scale * factor));
    if (scale === this.scale) return false;
    this.scale = scale;
    if (!this.follow || x < this.width) this.right = anchor + ((this.width - x) / scale) * 1e9;
    return true;
  }

  pan(px) {
    this.follow = false;
    this.right += (px / this.scale) * 1e9;
  }

  centre(ns) {
    this.follow = false;
    this.right = ns + (this.width / this.scale) * 5e8;
  }
}
