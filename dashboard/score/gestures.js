// Owns: what the pointer does on the tracks: hover holds the picture and shows the record, drag
// and shift-wheel pan, wheel zooms at the pointer, click selects. Called by: score.js.
// It writes the view's cursor and hold, and asks score.js for everything else.

import { Tip, sliceAt } from './tooltip.js';

const CLICK_PX = 4;

export class Gestures {
  // score: {zoom(factor, x), select(id), hover(id), laneAt(y)}
  constructor({ plane, view, store, score }) {
    Object.assign(this, { plane, view, store, score });
    this.tip = new Tip();
    this.drag = null;
    plane.addEventListener('pointermove', (e) => this.move(e));
    plane.addEventListener('pointerleave', () => this.leave());
    plane.addEventListener('pointerdown', (e) => {
      this.drag = { x: e.clientX, far: 0 };
      plane.setPointerCapture(e.pointerId);
    });
    plane.addEventListener('pointerup', (e) => {
      if (this.drag && this.drag.far < CLICK_PX) this.click(e);
      this.drag = null;
    });
    plane.addEventListener('wheel', (e) => this.wheel(e), { passive: false });
  }

  leave() {
    this.view.hold = false;
    this.view.cursor = null;
    this.score.hover(null);
    this.tip.hide();
  }

  wheel(e) {
    e.preventDefault();
    const sideways = e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY);
    if (sideways) this.view.pan(e.deltaX || e.deltaY);
    else this.score.zoom(e.deltaY < 0 ? 1.25 : 0.8, this.at(e).x);
  }

  at(e) {
    const box = this.plane.getBoundingClientRect();
    return { x: e.clientX - box.left, y: e.clientY - box.top };
  }

  move(e) {
    if (this.drag && e.buttons) {
      const dx = e.clientX - this.drag.x;
      this.drag.far += Math.abs(dx);
      this.drag.x = e.clientX;
      if (this.drag.far >= CLICK_PX) {
        this.view.pan(-dx);
        this.tip.hide();
        return;
      }
    }
    const { x, y } = this.at(e);
    this.view.hold = true;
    this.view.cursor = this.view.ns(x);
    const { index, found } = this.under(y);
    this.score.hover(found ? found.id : null);
    if (index === null) this.tip.hide();
    else this.tip.show(this.store, index, found, e);
  }

  // The iteration under the cursor and what the lane at y shows in it.
  under(y) {
    const { columns } = this.store;
    const index = columns.find(this.view.cursor);
    if (!columns.has(index)) return { index: null, found: null };
    const lane = this.score.laneAt(y);
    return { index, found: lane === null ? null : sliceAt(columns, index, lane) };
  }

  click(e) {
    const { x, y } = this.at(e);
    this.view.cursor = this.view.ns(x);
    const { found } = this.under(y);
    this.score.select(found ? found.id : null);
  }
}
