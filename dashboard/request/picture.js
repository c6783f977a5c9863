// Owns: the picture of one request: its lane, the neighbours that cost it most, the gap before each
// token, its blocks and its batch row, on one time axis, and the pointer and keys that read it.
// Called by: page.js. It draws on a canvas; what the cursor is on is told in words below it, so
// that nothing is known by sight alone.

import { make, surface, write } from '../dom.js';
import { duration, int, plural } from '../format.js';
import { phrase } from './causes.js';
import { gapStrip, gapWords } from './gaps.js';
import { drawLane, drawMarks, spanAt } from './lane.js';
import { TimeScale } from './scale.js';
import { drawAxis, drawColumn, drawGaps, gutterOfGaps, most, nameGaps } from './strips.js';

// In rem, so that the picture grows with the type on large screens.
const REM = { gutter: 8.6, lane: 2.3, small: 1.35, strip: 2.6, space: 1.1, gaps: 9, gapsMost: 30 };
const NAMED = 5;
const HINT = 'Point at an instant, or step through the tokens, to read it here.';
const GAPS_SHARE = 0.24; // of the window's height

export class Picture {
  // nameOf(request_id) answers the short name of a request.
  constructor({ nameOf }) {
    this.nameOf = nameOf;
    this.scale = new TimeScale();
    this.body = null;
    this.others = []; // [{body, shift_ms}]
    this.at_ms = null;
    this.build();
  }

  build() {
    this.canvas = make('canvas', { 'aria-hidden': 'true' });
    this.hair = make('div', { class: 'req-hair', hidden: true });
    this.plane = make(
      'div',
      {
        class: 'req-plane',
        tabindex: 0,
        role: 'application',
        'aria-label': 'Lane, neighbours, token gaps, blocks and batch row over time',
        'aria-describedby': 'req-keys',
        onpointermove: (e) => this.hover(e),
        onpointerdown: (e) => this.grab(e),
        onpointerup: () => (this.held = null),
        onpointerleave: () => this.held || this.read(null),
        onwheel: (e) => this.wheel(e),
        ondblclick: () => this.whole(),
        onkeydown: (e) => this.key(e),
      },
      this.canvas,
      this.hair,
    );
    this.words = make('p', { class: 'req-words', role: 'status' });
    const keys = 'arrows step through the tokens · + and − zoom · 0 shows all · drag pans';
    this.element = make(
      'div',
      { class: 'req-picture' },
      make('div', { class: 'req-reading' }, this.words, make('p', { id: 'req-keys', text: keys })),
      this.plane,
    );
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.plane);
  }

  theme(colours) {
    this.colours = colours;
    this.draw();
  }

  clear() {
    this.body = this.at_ms = null;
    this.others = [];
    this.scale.whole(1);
  }

  // A newer explanation of the same request; `others` are those of its neighbours.
  show(body, others) {
    const anew = !this.body;
    this.body = body;
    this.others = others;
    this.strip = gapStrip(body, NAMED);
    const until = Math.max(body.e2e_ms, ...body.timeline.map(({ at_ms }) => at_ms)) * 1.01;
    if (anew) this.scale.whole(until);
    else this.scale.grow(until);
    this.draw();
    this.read(this.at_ms);
  }

  draw() {
    const width = this.plane.clientWidth;
    if (!width || !this.colours || !this.body) return;
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const box = this.place(rem);
    const ctx = surface(this.canvas, width, box.height);
    this.scale.place(box.gutter, width - box.gutter - rem);
    ctx.clearRect(0, 0, width, box.height);
    ctx.font = this.font(rem, 0.846);
    drawAxis(ctx, this.colours, { scale: this.scale, height: box.height, rem });
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.gutter, 0, width - box.gutter, box.height);
    ctx.clip();
    this.drawTracks(ctx, box, rem);
    ctx.restore();
    this.drawGutter(ctx, box, rem);
    this.placeHair();
  }

  font(rem, size, weight = 400) {
    return `${weight} ${(size * rem).toFixed(1)}px ${this.colours.font}`;
  }

  // Where each track stands, in px.
  place(rem) {
    const px = Object.fromEntries(Object.entries(REM).map(([k, v]) => [k, Math.round(v * rem)]));
    const others = px.lane + px.space;
    const gaps = others + this.others.length * px.small + (this.others.length ? px.space / 2 : 0);
    const fixed = gaps + 2 * (px.strip + px.space) + px.space + 1.6 * rem;
    const tall = Math.max(px.gaps, Math.min(px.gapsMost, GAPS_SHARE * innerHeight));
    const blocks = gaps + tall + px.space,
      rows = blocks + px.strip + px.space;
    return { ...px, others, gaps, tall, blocks, rows, height: Math.round(fixed + tall) };
  }

  drawTracks(ctx, box, rem) {
    const { colours: c, scale, body } = this,
      { lane } = body;
    drawLane(ctx, c, lane, { scale, y: 4, h: box.lane });
    drawMarks(ctx, c, body, { scale, y: 4, h: box.lane });
    this.others.forEach((other, i) => {
      const y = box.others + i * box.small,
        h = box.small - 4;
      drawLane(ctx, c, other.body.lane, { scale, y, h, shift_ms: other.shift_ms });
    });
    const gaps = { scale, y: box.gaps, height: box.tall, rem };
    drawGaps(ctx, c, this.strip, gaps);
    ctx.font = this.font(rem, 0.923);
    nameGaps(ctx, c, this.strip, { ...gaps, words: (gap) => gapWords(gap, this.nameOf) });
    const strip = { scale, height: box.strip };
    drawColumn(ctx, lane, { ...strip, values: lane.blocks, y: box.blocks, fill: c.used });
    const rows = { values: lane.row, y: box.rows, fill: c.muted, hangs: true };
    drawColumn(ctx, lane, { ...strip, ...rows });
    ctx.fillStyle = c.line;
    for (const y of [box.blocks, box.rows]) {
      ctx.fillRect(scale.left, y + box.strip, scale.width, 1);
    }
  }

  drawGutter(ctx, box, rem) {
    const { colours: c, body } = this;
    const line = 1.3 * rem;
    const write = (text, y, style = c.muted, size = 0.923, weight = 400) => {
      ctx.font = this.font(rem, size, weight);
      ctx.fillStyle = style;
      ctx.fillText(fitted(ctx, text, box.gutter - 0.8 * rem), 0, y);
    };
    ctx.textAlign = 'left';
    ctx.textBaseline = 'middle';
    write(this.nameOf(body.request_id), 4 + box.lane / 2, c.text, 1, 600);
    this.others.forEach((other, i) => {
      write(this.nameOf(other.body.request_id), box.others + i * box.small + box.small / 2 - 2);
    });
    write('token gaps', box.gaps + line / 2, c.text, 0.923, 600);
    if (this.strip.bars.length) {
      gutterOfGaps(this.strip).forEach(([name, value], i) => {
        write(`${name}  ${value}`, box.gaps + line * (i + 1.5));
      });
    } else write('no second token yet', box.gaps + line * 1.5);
    for (const [name, y, values] of [
      ['KV blocks', box.blocks, body.lane.blocks],
      ['batch row', box.rows, body.lane.row],
    ]) {
      write(name, y + line / 2, c.text, 0.923, 600);
      write(`most ${most(values)}`, y + line * 1.5);
    }
  }

  // ---- reading it

  hover(e) {
    const x = e.clientX - this.plane.getBoundingClientRect().left;
    if (this.held) {
      this.scale.pan(this.scale.ms(this.held.x) - this.scale.ms(x));
      this.held.x = x;
      this.draw();
      return;
    }
    this.read(x < this.scale.left ? null : this.scale.ms(x));
  }

  grab(e) {
    if (e.button) return;
    this.held = { x: e.clientX - this.plane.getBoundingClientRect().left };
    this.plane.setPointerCapture(e.pointerId);
  }

  // Plain turning scrolls the page; with Ctrl (or pinching) it zooms at the pointer.
  wheel(e) {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    const x = e.clientX - this.plane.getBoundingClientRect().left;
    this.zoom(e.deltaY < 0 ? 1.25 : 0.8, this.scale.ms(x));
  }

  zoom(factor, at_ms = this.at_ms ?? undefined) {
    this.scale.zoom(factor, at_ms);
    this.draw();
  }

  whole() {
    this.scale.zoom(1e-12);
    this.draw();
  }

  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const acts = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.step(-Infinity),
      End: () => this.step(Infinity),
      '+': () => this.zoom(1.25),
      '=': () => this.zoom(1.25),
      '-': () => this.zoom(0.8),
      0: () => this.whole(),
    };
    const act = acts[e.key];
    if (!act) return;
    e.preventDefault();
    e.stopPropagation();
    act();
  }

  // The token after or before the cursor.
  step(by) {
    const gaps = this.body?.gaps ?? [];
    if (!gaps.length) return;
    const now = this.at_ms ?? (by > 0 ? -1 : Infinity);
    const next =
      by > 0 ? gaps.find(({ at_ms }) => at_ms > now) : gaps.findLast(({ at_ms }) => at_ms < now);
    const last = by > 0 ? gaps.at(-1) : gaps[0];
    this.go((Math.abs(by) === 1 ? (next ?? last) : last).at_ms);
  }

  go(at_ms) {
    this.scale.reveal(at_ms);
    this.draw();
    this.read(at_ms);
  }

  read(at_ms) {
    this.at_ms = at_ms;
    this.placeHair();
    write(this.words, at_ms === null || !this.body ? HINT : this.describe(at_ms));
  }

  placeHair() {
    const { at_ms, scale } = this;
    this.hair.hidden = at_ms === null || at_ms < scale.from_ms || at_ms > scale.to_ms;
    if (!this.hair.hidden) this.hair.style.transform = `translateX(${scale.x(at_ms)}px)`;
  }

  describe(at_ms) {
    const { lane, gaps } = this.body;
    const i = spanAt(lane, at_ms - 1e-6);
    const words = [`+${duration(at_ms)}`];
    if (i >= 0 && at_ms <= lane.end_ms[i] + 1e-6) {
      words.push(phrase(lane.kind[i]));
      if (lane.row[i] !== null) {
        const facts = [plural(lane.tokens[i], 'token'), plural(lane.blocks[i], 'block')];
        words.push(...facts, `batch row ${int(lane.row[i])}`);
      }
    }
    const gap = gaps.find((one) => one.at_ms >= at_ms - 1e-6);
    if (gap && gap.at_ms - gap.ms <= at_ms) {
      words.push(`token ${int(gap.token)} after ${gapWords(gap, this.nameOf)}`);
    }
    return words.join(' · ');
  }
}

function fitted(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let short = text;
  while (short.length > 1 && ctx.measureText(short + '…').width > width) {
    short = short.slice(0, -1);
  }
  return short + '…';
}
