// Owns: the time axis under the tracks. Called by: score.js. Its ticks are plain elements that
// move by transforms, and stand at round times of day.

import { make, write } from '../dom.js';
import { timeOfDay } from '../format.js';

const STEPS_S = [0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20];
const LABEL_PX = 95;

export class Axis {
  constructor(view, ticks) {
    Object.assign(this, { view, ticks });
    this.at = [];
  }

  // Which ticks there are; at 8 Hz.
  draw(startedUs, rem) {
    const { view, ticks } = this;
    const least = (LABEL_PX * rem) / 13;
    const step_ns = 1e9 * (STEPS_S.find((s) => s * view.scale >= least) ?? 20);
    this.at.length = 0;
    // Ticks stand at round times of day; the server's zero is no round time.
    const phase_ns = (startedUs % (step_ns / 1e3)) * 1e3;
    const first_ns = Math.ceil((view.left + phase_ns) / step_ns) * step_ns - phase_ns;
    for (let ns = first_ns; ns < view.right; ns += step_ns) {
      const tick =
        ticks.children[this.at.length] ||
        ticks.appendChild(make('div', { class: 'tick' }, make('b')));
      this.at.push(ns);
      tick.hidden = ns < 0;
      const whole = Math.round(ns / 1e6 + startedUs / 1e3) % 1000 === 0;
      tick.classList.toggle('whole', whole);
      write(tick.firstChild, timeOfDay(ns, startedUs, whole ? 0 : 2));
    }
    for (let i = this.at.length; i < ticks.children.length; i++) ticks.children[i].hidden = true;
    this.slide();
  }

  clear() {
    this.at.length = 0;
    for (const tick of this.ticks.children) tick.hidden = true;
  }

  // Where they are; each frame.
  slide() {
    this.at.forEach((ns, i) => {
      this.ticks.children[i].style.transform = `translateX(${Math.round(this.view.x(ns))}px)`;
    });
  }
}
