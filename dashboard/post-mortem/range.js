// Owns: the strip that shows a whole run small, with the window on it: tokens a second, the queue,
// preemptions, where records were lost and what broke. Called by: page.js. Drag chooses a window,
// dragging the window moves it, arrows move it, + and - stretch it.

import { make, surface, write } from '../dom.js';
import { duration, timeOfDay } from '../format.js';
import { most } from './overview.js';
import { moved, scaled, within } from './window.js';

const LEAST_PX = 3;
const STEPS = { ArrowLeft: -0.25, ArrowRight: 0.25, PageUp: -1, PageDown: 1 };

export class Range {
  // onChoose([from_us, to_us], done) while and after a window is chosen.
  // beside: an element that stands with the window's length.
  constructor({ onChoose, beside }) {
    this.onChoose = onChoose;
    this.canvas = make('canvas');
    this.brush = make('div', { class: 'brush' });
    this.hint = make('div', { class: 'range-hint', hidden: true });
    this.words = make('p', { class: 'range-words' });
    this.plane = make(
      'div',
      {
        class: 'range-plane',
        tabindex: 0,
        role: 'slider',
        'aria-valuemin': '0',
        'aria-valuemax': '0',
        'aria-valuenow': '0', // until it is known what there is to choose from
        'aria-label': 'Window in the run: arrows move it, plus and minus stretch it',
        onkeydown: (e) => this.key(e),
        onpointerdown: (e) => this.down(e),
        onpointermove: (e) => this.move(e),
        onpointerup: (e) => this.up(e),
        onpointerleave: () => {
          this.hint.hidden = true;
        },
      },
      this.canvas,
      this.brush,
      this.hint,
    );
    this.ends = [make('span'), make('span')];
    this.element = make(
      'div',
      { class: 'range' },
      this.plane,
      make('div', { class: 'range-ends' }, this.ends[0], keys(), this.words, beside, this.ends[1]),
    );
    this.extent = null;
    this.window = null;
    this.data = null;
    this.noted = [];
    new ResizeObserver(() => this.draw()).observe(this.plane);
  }

  theme(colours) {
    this.colours = colours;
    this.draw();
  }

  // extent: [from_us, to_us] of what is drawn; data: columns of bucketsOf, or null while it loads.
  show(extent, data, noted = []) {
    Object.assign(this, { extent, data, noted });
    this.draw();
    this.place();
  }

  choose(window) {
    this.window = window;
    this.place();
  }

  x(us) {
    const [from, to] = this.extent;
    return ((us - from) / Math.max(1, to - from)) * this.plane.clientWidth;
  }

  us(x) {
    const [from, to] = this.extent;
    return from + (x / Math.max(1, this.plane.clientWidth)) * (to - from);
  }

  place() {
    const { extent, window, plane } = this;
    this.brush.hidden = !extent || !window;
    if (this.brush.hidden) return;
    const left = this.x(window[0]),
      right = this.x(window[1]);
    this.brush.style.left = left + 'px';
    this.brush.style.width = Math.max(2, right - left) + 'px';
    const seconds = (us) => Math.round((us - extent[0]) / 1e6);
    plane.setAttribute('aria-valuemin', '0');
    plane.setAttribute('aria-valuemax', String(seconds(extent[1])));
    plane.setAttribute('aria-valuenow', String(seconds(window[0])));
    const said = window.map((us) => timeOfDay(0, us, 1)).join(' to ');
    plane.setAttribute('aria-valuetext', said);
    this.ends.forEach((end, i) => write(end, timeOfDay(0, extent[i])));
  }

  say(words) {
    write(this.words, words);
  }

  draw() {
    const width = this.plane.clientWidth,
      height = this.plane.clientHeight;
    if (!width || !height || !this.colours) return;
    const ctx = surface(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    if (this.extent && this.data) this.paint(ctx, width, height);
    this.place();
  }

  paint(ctx, width, height) {
    const { colours: c, data } = this;
    const n = data.rate.length,
      wide = width / n,
      base = height - 1;
    const bars = (column, top, hue, alpha) => {
      const high = usual(column);
      ctx.fillStyle = hue;
      ctx.globalAlpha = alpha;
      column.forEach((value, i) => {
        if (!value) return;
        const tall = Math.max(1, Math.min(1, value / high) * (base - top));
        ctx.fillRect(i * wide, base - tall, Math.max(1, wide - 0.4), tall);
      });
      ctx.globalAlpha = 1;
    };
    bars(data.rate, 10, c.device, 0.75);
    this.line(ctx, data.waiting, { wide, base, hue: c.kv });
    ctx.fillStyle = c.preempted;
    data.preempted.forEach(
      (count, i) => count && ctx.fillRect(i * wide, 0, Math.max(1.5, wide), 4),
    );
    ctx.fillStyle = c.pattern.lost;
    data.lost.forEach((count, i) => count && ctx.fillRect(i * wide - 1, 0, wide + 3, height));
    for (const { kind, at_us } of this.noted) this.note(ctx, kind, this.x(at_us), height);
  }

  line(ctx, column, { wide, base, hue }) {
    const high = most(column);
    if (!high) return;
    ctx.strokeStyle = hue;
    ctx.lineWidth = 1.4;
    ctx.beginPath();
    column.forEach((value, i) => {
      const y = base - (value / high) * (base - 10);
      if (i) ctx.lineTo((i + 0.5) * wide, y);
      else ctx.moveTo(0, y);
    });
    ctx.stroke();
  }

  note(ctx, kind, x, height) {
    const { colours: c } = this;
    if (kind === 'lost') {
      ctx.fillStyle = c.pattern.lost;
      ctx.fillRect(x - 3, 0, 6, height);
      return;
    }
    ctx.fillStyle = c.bad;
    ctx.beginPath();
    ctx.moveTo(x - 5, 0);
    ctx.lineTo(x + 5, 0);
    ctx.lineTo(x, 8);
    ctx.fill();
  }

  // ---- choosing

  at(e) {
    return e.clientX - this.plane.getBoundingClientRect().left;
  }

  down(e) {
    if (!this.extent || e.button) return;
    const x = this.at(e);
    const inside = this.window && x >= this.x(this.window[0]) && x <= this.x(this.window[1]);
    const wide = this.window && this.x(this.window[1]) - this.x(this.window[0]);
    const whole = 0.98 * this.plane.clientWidth; // a window of the whole run cannot be moved
    this.drag = {
      x,
      from: x,
      keeps: inside && wide > 8 && wide < whole ? [...this.window] : null,
      far: false,
    };
    this.plane.setPointerCapture(e.pointerId);
  }

  move(e) {
    const x = this.at(e);
    if (!this.extent) return;
    this.tell(x);
    if (!this.drag) return;
    const { from, keeps } = this.drag;
    this.drag.far ||= Math.abs(x - from) > LEAST_PX;
    if (!this.drag.far) return;
    const by = this.us(x) - this.us(from);
    const asked = keeps
      ? keeps.map((us) => us + by)
      : [Math.min(x, from), Math.max(x, from)].map((edge) => this.us(edge));
    this.choose(within(asked, this.extent));
    this.onChoose(this.window, false);
  }

  up(e) {
    const { drag } = this;
    this.drag = null;
    if (!drag || !this.extent) return;
    if (drag.far) {
      this.onChoose(this.window, true);
      return;
    }
    // A click brings the window there.
    const middle = this.us(this.at(e)),
      half = (this.window[1] - this.window[0]) / 2;
    this.choose(within([middle - half, middle + half], this.extent));
    this.onChoose(this.window, true);
  }

  tell(x) {
    const us = this.us(x);
    const near = this.noted.find((noted) => Math.abs(this.x(noted.at_us) - x) < 7);
    const { data, extent } = this;
    const i = Math.floor(((us - extent[0]) / Math.max(1, extent[1] - extent[0])) * 480);
    const there = data && data.rate[i] !== undefined;
    const words = [
      timeOfDay(0, us, 1),
      near?.words,
      there && `${Math.round(data.rate[i])} tokens/s`,
      there && data.waiting[i] > 0 && `${data.waiting[i]} waited`,
      there && data.preempted[i] > 0 && `${data.preempted[i]} preempted`,
      there && data.lost[i] > 0 && `${data.lost[i]} iterations lost`,
    ];
    write(this.hint, words.filter(Boolean).join(' · '));
    this.hint.hidden = false;
    const most_px = this.plane.clientWidth - this.hint.offsetWidth;
    this.hint.style.left = Math.max(0, Math.min(most_px, x + 10)) + 'px';
  }

  key(e) {
    if (!this.extent || !this.window) return;
    let asked = null;
    if (STEPS[e.key]) asked = moved(this.window, STEPS[e.key]);
    else if (e.key === '+' || e.key === '=') asked = scaled(this.window, 2);
    else if (e.key === '-') asked = scaled(this.window, 0.5);
    else if (e.key === 'Home') asked = moved(this.window, -1e9);
    else if (e.key === 'End') asked = moved(this.window, 1e9);
    if (!asked) return;
    e.preventDefault();
    e.stopPropagation();
    this.choose(within(asked, this.extent));
    this.onChoose(this.window, true);
  }
}

const keys = () =>
  make(
    'span',
    { class: 'range-keys' },
    make('i', { class: 'key-rate', text: 'tokens/s' }),
    make('i', { class: 'key-queue', text: 'waiting' }),
  );

// A scale on which a few spikes do not hide the rest: they are cut at the top.
function usual(column) {
  const seen = [...column].filter(Boolean).sort((a, b) => a - b);
  if (!seen.length) return 1;
  return Math.min(seen[seen.length - 1], 3 * seen[Math.floor(seen.length * 0.9)]);
}

export const lengthWords = ([from, to]) => duration((to - from) / 1e3);
