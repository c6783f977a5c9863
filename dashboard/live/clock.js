// Owns: what time it is at the server, in its own nanoseconds, learned from when records come in.
// Called by: main.js (note) and page.js (read). A record is never early, so the smallest distance
// seen between the page's clock and a record's end is the best guess; it is taken over two rolling
// windows, so that it follows drift. It must never read a wall clock.

const WINDOW_MS = 5000;
const DELAY_NS = 120e6; // records come 10 to 20 times a second: drawn this late they glide
const JUMP_NS = 2e9; // records so late, and none earlier, for a second: one of the clocks jumped
const JUMP_MS = 1000;
const REST_NS = 600e6; // room kept right of the last column when nothing runs

export class Clock {
  constructor() {
    this.clear();
  }

  clear() {
    this.best = Infinity;
    this.before = Infinity;
    this.windowAt = -Infinity;
    this.jumpedAt = null; // since when every record was late, and by how much at least
    this.jumped = Infinity;
    this.heardMs = 0;
  }

  note(record_ns, now_ms) {
    const distance = now_ms * 1e6 - record_ns;
    if (this.jump(distance, now_ms)) return;
    if (now_ms - this.windowAt > WINDOW_MS) {
      this.before = this.best;
      this.best = distance;
      this.windowAt = now_ms;
    }
    this.best = Math.min(this.best, distance);
  }

  // A machine that slept, or a server that stood still: the old distance holds no longer.
  jump(distance, now_ms) {
    if (!this.known || distance - Math.min(this.best, this.before) < JUMP_NS) {
      this.jumpedAt = null;
      return false;
    }
    this.jumped = this.jumpedAt === null ? distance : Math.min(this.jumped, distance);
    this.jumpedAt ??= now_ms;
    if (now_ms - this.jumpedAt < JUMP_MS) return true;
    this.best = this.before = this.jumped;
    this.windowAt = now_ms;
    this.jumpedAt = null;
    return true;
  }

  // Any event, a record or not: the link is alive.
  hear(now_ms) {
    this.heardMs = now_ms;
  }

  get known() {
    return this.best < Infinity;
  }

  nowNs(now_ms) {
    return now_ms * 1e6 - Math.min(this.best, this.before);
  }

  silentNs(now_ms) {
    return Math.max(0, now_ms - this.heardMs) * 1e6;
  }

  // Where the right edge of a following view belongs. While something runs, or the link is down,
  // time goes on; when nothing runs the picture rests on the last iteration.
  edgeNs(now_ms, newest_ns, moving) {
    const now_ns = this.nowNs(now_ms) - DELAY_NS;
    return Math.max(newest_ns, moving ? now_ns : Math.min(now_ns, newest_ns + REST_NS));
  }
}
