// Owns: the score band: the height of a lane, the names in its gutter, and the words inside long
// spans. Called by: score.js. Bodies and marks come from marks.js, motion from track.js.
// Sizes are read on resize only: reading them in a frame would force a layout.

import { make, surface, write } from '../dom.js';
import { duration, int, plural, reason } from '../format.js';
import { KIND, isMark } from './kinds.js';
import { paintColumn, paintMarks } from './marks.js';
import { Track } from './track.js';

const LANE = { most: 26, least: 1.25, wanted: 12, patience_ms: 2000 };
const TAGS_MAX = 40;
const AHEAD_NS = 20e9; // drawn beyond the window, since the picture moves on between two drawings
const NAMED = 10; // px a lane needs to carry words
const TOP = 4; // px above the first lane, as in live.css

export class Lanes {
  constructor({ host, gutter, view, store, mine }) {
    Object.assign(this, { host, gutter, view, store, mine });
    this.laneHeight = 18;
    this.tags = [];
    this.canvas = make('canvas', { 'aria-hidden': 'true' });
    gutter.append(this.canvas);
    const paintWith = (draw) => (ctx, index, box, from) =>
      draw(ctx, this.colours, this.store.columns, index, this.place(box), from);
    this.track = new Track({
      host,
      view,
      paint: paintWith(paintColumn),
      late: paintWith(paintMarks),
    });
    this.words = make('div', { class: 'labels' });
    this.lit = make('div', { class: 'lit', hidden: true });
    this.track.scroller.append(this.lit, this.words);
  }

  place({ x0, x1, height, origin }) {
    const at = (ns) => this.view.world(ns) - origin;
    return { x0, x1, height, laneHeight: this.laneHeight, at };
  }

  theme(colours) {
    this.colours = colours;
    this.track.invalidate();
  }

  // Lanes in the window, in steps of four. Room is made at once and given back after a while.
  wanted() {
    if (!this.view.settled) return LANE.wanted;
    const { slots } = this.store.lanes;
    let most = slots.length - 1;
    while (most >= 0 && !slots[most].request && slots[most].free_at_ns < this.view.left) most--;
    const lanes = Math.max(LANE.wanted, Math.ceil((most + 1) / 4) * 4);
    const now = performance.now();
    if (!this.lanes || lanes >= this.lanes) {
      this.lanes = lanes;
      this.roomySince = now;
    } else if (now - this.roomySince > LANE.patience_ms) this.lanes = lanes;
    return this.lanes;
  }

  measure(rem) {
    this.rem = rem;
    this.height = this.host.clientHeight;
    this.gutterWidth = this.gutter.clientWidth;
  }

  fit() {
    const room = (this.height - 2 * TOP) / this.wanted();
    const half = room > 4 ? Math.floor(room * 2) / 2 : room; // half pixels while one sees them
    const lane = Math.max(LANE.least, Math.min((LANE.most * this.rem) / 13, half));
    if (lane !== this.laneHeight) {
      this.laneHeight = lane;
      this.track.invalidate();
    }
    this.track.resize(Math.max(this.height, this.store.lanes.inUse * lane));
  }

  laneAt(y) {
    const lane = Math.floor((y - TOP) / this.laneHeight);
    return lane >= 0 && lane < this.store.lanes.inUse ? lane : null;
  }

  // Names and output counts, of now or of the iteration under the cursor.
  drawGutter(selected, index) {
    const { colours: c, laneHeight, store, height, gutterWidth: width } = this;
    const ctx = surface(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    ctx.textBaseline = 'middle';
    if (laneHeight < NAMED) {
      this.drawNumbers(ctx, width, store.requests.get(selected));
      return;
    }
    ctx.font = `${Math.min(11, laneHeight - 1.5) * (this.rem / 13)}px ${c.font}`;
    store.lanes.slots.forEach((slot, lane) => {
      const r = index === null ? slot.request ?? this.formerly(slot) : this.occupant(lane, index);
      const y = lane * laneHeight + laneHeight / 2;
      if (!r || y > height) return;
      const waits = r.state === 'waiting' || r.state === 'preempted';
      const quiet = waits || (r.end && index === null);
      ctx.fillStyle = quiet && r.id !== selected ? c.muted : c.text;
      ctx.textAlign = 'left';
      if (this.mine.has(r)) ctx.fillText('▸', 5, y);
      ctx.fillText(r.name, 16, y);
      ctx.textAlign = 'right';
      ctx.fillStyle = c.faint;
      if (!waits && r.output) ctx.fillText(int(r.output), width - 9, y);
    });
  }

  // While nothing runs the picture rests, and so do the names of those in it.
  formerly(slot) {
    return this.store.live.size || slot.free_at_ns < this.view.left ? null : slot.last;
  }

  // Lanes too low for names: every sixteenth has its number, the lit one its name.
  drawNumbers(ctx, width, lit) {
    const { colours: c, laneHeight } = this;
    ctx.fillStyle = c.faint;
    ctx.textAlign = 'right';
    ctx.font = `${(11 * this.rem) / 13}px ${c.font}`;
    for (let lane = 0; lane < this.store.lanes.inUse; lane += 16) {
      const y = lane * laneHeight + 7;
      if (y < this.height) ctx.fillText('lane ' + lane, width - 9, y);
    }
    if (!lit || lit.lane < 0) return;
    const y = Math.max(7, (lit.lane + 0.5) * laneHeight);
    ctx.fillStyle = c.bg;
    ctx.fillRect(0, y - 8, width, 16);
    ctx.fillStyle = c.text;
    ctx.textAlign = 'left';
    ctx.fillText(lit.name, 16, y);
  }

  occupant(lane, index) {
    const { columns, requests } = this.store;
    for (let k = 0; k < columns.ops(index); k++) {
      const op = columns.op(index, k);
      if (columns.opLane[op] === lane && !isMark(columns.opKind[op])) {
        return requests.get(columns.opRequest[op]);
      }
    }
    return null;
  }

  // The selected request's stretch of its lane, from arrival to end: the lane had others before.
  light(r) {
    const { view, lit } = this;
    const to_ns = r?.end ? r.end.released_at_ns : view.right + AHEAD_NS;
    lit.hidden = !r || r.lane < 0 || to_ns < view.left;
    if (lit.hidden) return;
    const from = view.world(Math.max(r.arrived_at_ns, view.left - AHEAD_NS));
    lit.style.left = from - this.track.base + 'px';
    lit.style.width = view.world(to_ns) - from + 'px';
    lit.style.top = r.lane * this.laneHeight + 'px';
    lit.style.height = this.laneHeight - 1 + 'px';
  }

  // Words inside spans that are wide enough to hold them. They ride on the scroller.
  label() {
    const { view, store } = this;
    this.words.hidden = this.laneHeight < NAMED;
    if (this.words.hidden) return;
    const { left } = view;
    let used = 0;
    const show = (r) => {
      if (r.lane < 0) return;
      for (const s of merged(r.spans)) {
        if (s.to_ns < left || s.from_ns > view.right || used >= TAGS_MAX) continue;
        if (this.tag(used, r, s, Math.max(s.from_ns, left))) used++;
      }
    };
    for (const slot of store.lanes.slots) if (slot.request) show(slot.request);
    for (let i = store.ended.length - 1; i >= 0; i--) {
      const r = store.ended[i];
      if (r.end.released_at_ns < left) break;
      show(r);
    }
    for (let i = used; i < this.tags.length; i++) this.tags[i].hidden = true;
  }

  tag(at, r, span, from_ns) {
    const { view, rem } = this;
    const word = wordOf(span);
    const width = view.world(span.to_ns) - view.world(from_ns);
    if (!word || width < (word.length * 6.4 * rem) / 13 + 16) return false;
    const tag = this.tags[at] || (this.tags[at] = this.words.appendChild(make('span')));
    write(tag, word);
    tag.className = span.family === KIND.WAIT ? 'tag quieter' : 'tag';
    tag.hidden = false;
    const x = Math.round(view.world(from_ns) - this.track.base + 6);
    const inset = Math.round((this.laneHeight - 3 - (12 * rem) / 13) / 2);
    tag.style.transform = `translate(${x}px, ${r.lane * this.laneHeight + inset}px)`;
    return true;
  }
}

// One wait is one span with its main reason, however often the reason changed on the way.
function merged(spans) {
  const out = [];
  for (const s of spans) {
    const last = out[out.length - 1];
    if (s.family !== KIND.WAIT || !last || last.family !== KIND.WAIT) {
      const by = s.family === KIND.WAIT ? new Map([[s.detail, s.to_ns - s.from_ns]]) : null;
      out.push(by ? { ...s, by } : s);
      continue;
    }
    last.by.set(s.detail, (last.by.get(s.detail) || 0) + s.to_ns - s.from_ns);
    last.to_ns = s.to_ns;
  }
  for (const s of out) if (s.by) s.detail = [...s.by].sort((a, b) => b[1] - a[1])[0][0];
  return out;
}

function wordOf(s) {
  const time = duration((s.to_ns - s.from_ns) / 1e6);
  if (s.family === KIND.WAIT) return `${reason(s.detail)} ${time}`;
  if (s.family === KIND.PREEMPTED) return `preempted ${time}`;
  if (s.family === KIND.RECOMPUTE) return `recompute ${int(s.tokens)}`;
  if (s.family === KIND.PREFILL && s.tokens > 600) {
    return `prefill ${int(s.tokens)} in ${plural(s.steps, 'step')}`;
  }
  return s.family === KIND.HELD ? `batch held ${time}` : null;
}
