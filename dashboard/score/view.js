// Owns: the one window in time that every track shares, and the one cursor that joins them.
// Called by: the pages, score.js and gestures.js (write), every track (map). Pure numbers.

export const ZOOM = { least: 16, most: 3000, step: 1.25, start: 170 }; // CSS px a second
const OVERVIEW_LEAST = 0.5; // a past window may be long: minutes on one screen
const EASE_MS = 60;
const JUMP_NS = 3e9;

export class View {
  // `past`: it shows a window that is over, whole.
  constructor({ past = false } = {}) {
    this.past = past;
    this.width = 1000;
    this.scale = ZOOM.start;
    this.lead = 26; // px kept free right of the newest tile
    this.clear();
  }

  clear() {
    this.right = 0; // ns at the right edge
    this.follow = !this.past;
    this.asked = null; // a window that was asked for, until somebody zooms or pans
    this.hold = false;
    this.cursor = null; // ns under the pointer
    this.pinned = null; // ns under the keyboard's cursor
    this.settled = this.past;
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

  // Shows a window whole, from edge to edge, also once the width is known or changes.
  span(from_ns, to_ns) {
    this.asked = [from_ns, to_ns];
    this.follow = false;
    this.scale = this.bounded((this.width * 1e9) / Math.max(1, to_ns - from_ns));
    this.right = to_ns;
  }

  // Another width; `ratio` scales a window that nobody asked for to the size of the type.
  fit(width, ratio = 1) {
    this.width = width;
    if (this.asked) this.span(...this.asked);
    else this.scale *= ratio;
  }

  bounded(scale) {
    return Math.min(ZOOM.most, Math.max(this.past ? OVERVIEW_LEAST : ZOOM.least, scale));
  }

  zoom(factor, x = this.width) {
    const anchor = this.ns(x);
    const scale = this.bounded(this.scale * factor);
    if (scale === this.scale) return false;
    this.asked = null;
    this.scale = scale;
    if (!this.follow || x < this.width) this.right = anchor + ((this.width - x) / scale) * 1e9;
    return true;
  }

  pan(px) {
    this.follow = false;
    this.asked = null;
    this.right += (px / this.scale) * 1e9;
  }

  // Moves only if nothing of a stretch is in view.
  reach(from_ns, to_ns) {
    if (from_ns > this.right || to_ns < this.left) this.centre(from_ns);
  }

  centre(ns) {
    this.follow = false;
    this.asked = null;
    this.right = ns + (this.width / this.scale) * 5e8;
  }
}
