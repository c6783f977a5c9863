// Owns: the time axis of the Request view: ms to px and back, round ticks, and the part of a life
// that is shown. Called by: picture.js. Pure; the whole life is shown until somebody zooms.

const STEPS_MS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 3e4, 6e4];
const LEAST_MS = 1;

export class TimeScale {
  constructor() {
    this.whole(1);
    this.place(0, 1);
  }

  // The life of `span_ms`: what was zoomed stays as it is while a running request grows.
  whole(span_ms) {
    this.span_ms = Math.max(LEAST_MS, span_ms);
    this.from_ms = 0;
    this.to_ms = this.span_ms;
    this.zoomed = false;
  }

  grow(span_ms) {
    this.span_ms = Math.max(LEAST_MS, span_ms);
    if (!this.zoomed) this.to_ms = this.span_ms;
  }

  place(left, width) {
    this.left = left;
    this.width = Math.max(1, width);
  }

  x(ms) {
    return this.left + ((ms - this.from_ms) / (this.to_ms - this.from_ms)) * this.width;
  }

  ms(x) {
    return this.from_ms + ((x - this.left) / this.width) * (this.to_ms - this.from_ms);
  }

  // `factor` above 1 shows less time; the instant `at_ms` stays where it is.
  zoom(factor, at_ms = (this.from_ms + this.to_ms) / 2) {
    const shown = this.to_ms - this.from_ms;
    const wanted = Math.min(this.span_ms, Math.max(LEAST_MS, shown / factor));
    const share = (at_ms - this.from_ms) / shown;
    this.show(at_ms - share * wanted, wanted);
  }

  pan(by_ms) {
    this.show(this.from_ms + by_ms, this.to_ms - this.from_ms);
  }

  show(from_ms, shown) {
    this.from_ms = Math.max(0, Math.min(this.span_ms - shown, from_ms));
    this.to_ms = this.from_ms + shown;
    this.zoomed = shown < this.span_ms * 0.999;
  }

  // Brings an instant into the middle third, if it is not in sight.
  reveal(at_ms) {
    const shown = this.to_ms - this.from_ms;
    if (at_ms >= this.from_ms && at_ms <= this.to_ms) return;
    this.show(at_ms - shown / 2, shown);
  }

  // Round instants, no closer than `least_px`.
  ticks(least_px) {
    const shown = this.to_ms - this.from_ms;
    const fits = (step) => (step / shown) * this.width >= least_px;
    const step = STEPS_MS.find(fits) ?? Math.ceil(shown / 6e4) * 6e4;
    const ticks = [];
    for (let at = Math.ceil(this.from_ms / step) * step; at <= this.to_ms; at += step) {
      ticks.push(at);
    }
    return ticks;
  }
}
