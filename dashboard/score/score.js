// Owns: the score as one part: lanes, strips, axis, charts of the last minutes, one cursor, one
// selection. Called by: every page that shows a window of the record, with a Store and a View of
// its own (Live feeds its store from the stream, Post-mortem from SQL). It reads the store and
// writes only the view, the cursor and the selection. Sizes are read on resize only; at most one
// slow job runs in a frame (60 Hz motion, 8 Hz maps, 1 Hz charts, and what the page adds).

import { duration, int, timeOfDay } from '../format.js';
import { make, write } from '../dom.js';
import { Axis } from './axis.js';
import { Bands } from './bands.js';
import { Gestures } from './gestures.js';
import { Lanes } from './lanes.js';
import { legend } from './legend.js';
import { Overview } from './overview.js';
import { toolbar, tracks } from './stage.js';

const NOBODY = Object.freeze({ has: () => false });
const BEFORE_PX = 190; // room for the words
const EDGE_PX = 40; // the keyboard's cursor is kept so far inside

export class Score {
  // mine.has(r): whose lane carries a mark. onSelect(id or null) and onHover(id or null) are told.
  // `past`: the window is over, so there is nothing to follow and no "now".
  constructor({ store, view, mine = NOBODY, past = false, onSelect, onHover }) {
    Object.assign(this, { store, view, past, onSelect, onHover });
    this.selected = this.hovered = this.cursorIndex = null;
    this.sized = 0; // how often its size was read; what stands beside it follows
    this.tools = toolbar({
      onFollow: past ? null : () => this.toggle(),
      onZoom: (factor) => this.zoom(factor),
    });
    const t = (this.stage = tracks());
    this.host = t.score; // where a page puts words while there is nothing to draw
    this.lanes = new Lanes({ host: t.score, gutter: t.gutter, view, store, mine });
    this.bands = new Bands({ stage: t, view, score: this });
    this.axis = new Axis(view, t.ticks);
    this.gestures = new Gestures({ plane: t.plane, view, store, score: this });
    this.overview = new Overview({
      past,
      onGo: (second) => view.centre(second * 1e9),
      onCursor: (second) => {
        view.cursor = second === null ? null : second * 1e9;
      },
    });
    this.element = make(
      'div',
      { class: 'stage' },
      this.tools.element,
      t.element,
      this.overview.element,
    );
    this.jobs = [];
    this.every(125, () => this.maps());
    if (past) this.every(1000, () => this.minutes({ now_ns: this.store.columns.newestNs + 1e9 }));
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(t.element);
  }

  // A job of the page's own, in turn with the score's.
  every(every_ms, run) {
    this.jobs.push({ every_ms, run, due_ms: this.jobs.length });
  }

  // Shows another store's records; nothing of the former one's stays.
  use(store) {
    this.store = this.lanes.store = this.gestures.store = store;
    this.selected = null;
    this.clear();
    this.describe();
  }

  // ---- selection, cursor, window

  select(id) {
    this.selected = id === this.selected ? null : id;
    this.onSelect?.(this.selected);
  }

  hover(id) {
    if (id === this.hovered) return;
    this.hovered = id;
    this.onHover?.(id);
  }

  // Select, and bring its lane into view.
  show(id) {
    if (this.selected !== id) this.select(id);
    const r = this.store.requests.get(id);
    if (!this.past) this.view.follow = true;
    else if (r) this.view.reach(r.arrived_at_ns, r.end?.released_at_ns ?? Infinity);
  }

  laneAt(y) {
    return y < this.lanes.height ? this.lanes.laneAt(y) : null;
  }

  toggle() {
    if (this.past) return;
    this.view.follow = !this.view.follow;
    this.label();
  }

  zoom(factor, x) {
    if (this.view.zoom(factor, x)) this.redraw();
  }

  pan(share) {
    this.view.pan(share * this.view.width);
  }

  // The keyboard's cursor, `by` iterations on.
  step(by) {
    const { view, store } = this,
      { columns } = store;
    if (columns.count === columns.first) return;
    view.follow = false;
    const fresh = view.pinned === null;
    const at = columns.find(fresh ? view.right : view.pinned) + (fresh ? 0 : by);
    const s = columns.slot(Math.max(columns.first, Math.min(columns.last, at)));
    view.pinned = (columns.begin_at_ns[s] + columns.end_at_ns[s]) / 2;
    const x = view.x(view.pinned);
    if (x < EDGE_PX || x > view.width - EDGE_PX) view.centre(view.pinned);
  }

  // The request `by` lanes below the lit one.
  lane(by) {
    const rows = this.store.lanes.slots
      .map((slot) => slot.request ?? (this.past ? slot.last : null))
      .filter(Boolean);
    const at = rows.findIndex((r) => r.id === this.selected);
    const next = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
    if (next && next.id !== this.selected) this.select(next.id);
  }

  // Back to how it was opened: no cursor, nobody lit, following.
  reset() {
    this.view.pinned = null;
    if (!this.past) this.view.follow = true;
    if (this.selected !== null) this.select(null);
  }

  // ---- drawing

  theme(colours) {
    this.colours = colours;
    this.lanes.theme(colours);
    this.redraw();
    this.describe();
    if (this.rem) this.overview.build(colours, this.rem);
  }

  // The run changed: what its legend and bounds say follows.
  describe() {
    if (this.colours) legend(this.tools.legend, this.colours, this.store.run);
  }

  redraw() {
    this.lanes.track.invalidate();
    this.bands.invalidate();
  }

  resize() {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const width = this.stage.score.clientWidth;
    if (!width || !this.colours) return;
    this.view.fit(width, this.rem ? 1 : rem / 13);
    this.sized++;
    const grown = this.rem !== rem;
    this.rem = rem;
    this.lanes.measure(rem);
    this.bands.measure();
    this.lanes.fit();
    this.redraw();
    if (grown) this.overview.build(this.colours, rem);
    else this.overview.resize();
  }

  clear() {
    this.hovered = this.cursorIndex = null;
    this.redraw();
    this.bands.clear();
    if (!this.rem) return;
    this.lanes.drawGutter(null, null);
    this.lanes.label();
    this.lanes.light(null);
    this.stage.beyond.hidden = this.stage.before.hidden = true;
    for (const part of [this.overview, this.axis]) part.clear();
  }

  get drawable() {
    const { run, columns } = this.store;
    return run !== null && columns.count > columns.first;
  }

  // Each frame. `edge_ns` is where a following window ends; a past one stands still.
  frame(now_ms, elapsed_ms, edge_ns = 0) {
    if (!this.rem) return;
    if (this.drawable) {
      if (!this.past) this.view.tick(edge_ns, elapsed_ms);
      this.lanes.track.frame(this.store.columns);
      this.bands.frame(this.store.columns);
      this.cursor();
      this.opening();
      this.axis.slide();
    }
    let job = null;
    for (const one of this.jobs) {
      if (one.due_ms <= now_ms && (!job || one.due_ms < job.due_ms)) job = one;
    }
    if (!job) return;
    job.due_ms = now_ms + job.every_ms;
    job.run();
  }

  // The iteration that the figures show: the one under the cursor, or null for the newest.
  cursor() {
    const { view, stage, store } = this,
      { columns } = store;
    const ns = view.cursor ?? view.pinned;
    this.cursorIndex = ns === null ? null : columns.find(ns);
    if (stage.hair.hidden !== (ns === null)) stage.hair.hidden = ns === null;
    if (ns === null) return;
    const s = columns.slot(this.cursorIndex);
    const x0 = view.x(columns.begin_at_ns[s]),
      x1 = view.x(columns.end_at_ns[s]);
    stage.hair.style.transform = `translateX(${Math.round(x0)}px)`;
    stage.hair.style.width = Math.max(1, x1 - x0) + 'px';
    write(stage.hairText, timeOfDay(columns.end_at_ns[s], store.run.started_unix_us, 3));
  }

  // Left of the oldest column there is nothing to draw here, which is not to say nothing happened.
  opening() {
    const { view, stage, store } = this,
      { columns } = store;
    const x = view.x(columns.begin_at_ns[columns.slot(columns.first)]);
    if (stage.before.hidden !== x < 1) stage.before.hidden = x < 1;
    if (x < 1) return;
    stage.before.style.width = Math.min(view.width, x) + 'px';
    write(stage.before.firstChild, x > BEFORE_PX ? 'no records here from before' : '');
  }

  // The iteration shown, and whether it is one of the past: {index, past}.
  shown() {
    const { columns } = this.store;
    const past = this.cursorIndex !== null;
    return { index: past ? Math.max(columns.first, this.cursorIndex) : columns.last, past };
  }

  maps() {
    if (!this.drawable) return;
    const { store, view, stage } = this,
      { columns } = store,
      { index, past } = this.shown();
    const lit = this.hovered ?? this.selected;
    this.bands.fit(view, performance.now());
    this.lanes.fit();
    this.lanes.drawGutter(lit, past ? index : null);
    this.lanes.label();
    this.lanes.light(store.requests.get(lit));
    this.axis.draw(store.run.started_unix_us, this.rem);
    this.bands.write(columns.slot(index), past || this.past ? null : store.present());
    write(stage.span, `${duration((view.width / view.scale) * 1e3)} wide`);
    this.beyond(store.lanes.beyond);
    this.label();
  }

  // Those who have no lane are counted where lanes end.
  beyond(those) {
    const { beyond } = this.stage;
    beyond.hidden = those.length === 0;
    if (!those.length) return;
    const runs = those.some((r) => r.state === 'running');
    write(beyond, `+ ${int(those.length)} ${runs ? 'beyond the last lane' : 'more wait'}`);
    beyond.style.top = this.lanes.height - 30 + 'px';
  }

  label() {
    const { follow } = this.tools;
    if (!follow) return;
    write(follow, this.view.follow ? 'Pause' : 'Follow');
    follow.setAttribute('aria-pressed', String(!this.view.follow));
  }

  // Why the picture stands still; empty for nothing to say.
  tell(words) {
    this.stage.pill.hidden = !words;
    write(this.stage.pill, words);
  }

  // From an instant on there is no data, and that stretch grows with the clock; null: there is.
  silence(from_ns, words = 'no data') {
    const { gone } = this.stage;
    if (from_ns !== null) write(gone, words);
    if (gone.hidden !== (from_ns === null)) gone.hidden = from_ns === null;
    if (from_ns === null) return;
    gone.style.width = Math.max(0, this.view.width - this.view.x(from_ns)) + 'px';
  }

  // heard_ns: until when it is known what happened.
  minutes({ now_ns, heard_ns = now_ns }) {
    if (!this.store.run || !this.overview.plots.length) return;
    this.overview.update(this.store, this.view, { now_ns, heard_ns });
  }
}
