// Owns: the Live view: what is drawn when (60 Hz motion, 8 Hz maps, 4 Hz figures, 1 Hz charts).
// Called by: main.js. It reads the store and writes only the view, the cursor and the selection.
// Sizes are read on resize only; at most one slow job runs in a frame.

import { make, write } from '../dom.js';
import { Ended } from './ended.js';
import { duration, int, timeOfDay } from '../format.js';
import { Axis, Card } from '../score/axis.js';
import { Gestures } from '../score/gestures.js';
import { openSelected } from '../keys.js';
import { KvMap } from '../score/kvmap.js';
import { Lanes } from '../score/lanes.js';
import { legend } from '../score/legend.js';
import { Numbers } from './numbers.js';
import { Overview } from '../score/overview.js';
import { Queue } from '../score/queue.js';
import { toolbar, tracks } from '../score/stage.js';
import { Empty } from './empty.js';
import * as strips from '../score/strips.js';
import { Track } from '../score/track.js';
import { Verdict } from './verdict.js';

const PAINT = [strips.paintBatch, strips.paintStep, strips.paintPool];
const FIGURES = [
  (c, s) => [c.decode_tokens[s], c.prefill_tokens[s], c.padding_tokens[s]].map(int),
  (c, s) => {
    const tile = c.end_at_ns[s] - c.begin_at_ns[s];
    return [c.device_ns[s], tile - c.device_ns[s]].map((ns) => {
      const ms = Math.max(0, ns) / 1e6;
      return ms < 100 ? ms.toFixed(1) : int(ms);
    });
  },
  (c, s) => [c.kv_blocks_used[s], c.kv_blocks_cached[s]].map(int),
];
const IDLE_PILL_NS = 2e9;
const NOTICED_NS = 15e7;

export class Live {
  // app: {store, view, clock, mine, tryIt, selected, linkState}
  constructor(app) {
    this.app = app;
    this.store = app.store;
    this.view = app.view;
    this.hovered = null;
    const onPick = (id) => this.select(id),
      onHover = (id) => this.hover(id);
    this.numbers = new Numbers();
    this.verdict = new Verdict({ onPick: (id) => this.show(id) });
    this.kv = new KvMap({ onPick, onHover });
    this.queue = new Queue({ onPick, onHover });
    this.ended = new Ended({ onPick });
    this.card = new Card({
      onClear: () => this.select(null),
      onOpen: () => openSelected(app),
    });
    this.empty = new Empty();
    this.overview = new Overview({
      onGo: (second) => this.view.centre(second * 1e9),
      onCursor: (second) => {
        this.view.cursor = second === null ? null : second * 1e9;
      },
    });
    this.build();
    this.jobs = [
      [125, () => this.maps()],
      [250, () => this.figures()],
      [1000, () => this.minutes()],
    ].map(([every_ms, run], i) => ({ every_ms, run, due_ms: i }));
  }

  build() {
    const { view, store, app } = this;
    this.tools = toolbar({ onFollow: () => this.toggle(), onZoom: (f) => this.zoom(f) });
    const t = (this.stage = tracks());
    this.lanes = new Lanes({ host: t.score, gutter: t.gutter, view, store, mine: app.mine });
    this.scales = [strips.tokenScale(), strips.stepScale(), null];
    this.bands = t.strips.map(({ host }, i) => {
      const paint = (ctx, index, box) =>
        PAINT[i](ctx, this.colours, store.columns, index, {
          ...box,
          at: (ns) => view.world(ns) - box.origin,
          scale: this.scales[i],
          total: store.run.kv_blocks_total,
        });
      return new Track({ host, view, paint });
    });
    t.score.append(this.empty.element);
    this.axis = new Axis(view, t.ticks);
    this.gestures = new Gestures({ plane: t.plane, view, store, live: this });
    this.side = make(
      'aside',
      { class: 'side', 'aria-label': 'Details' },
      this.card.element,
      this.kv.element,
      this.queue.element,
      this.ended.element,
      app.tryIt.element,
    );
    this.element = make(
      'div',
      { class: 'view' },
      make('h1', { class: 'unseen', text: 'Live' }),
      this.numbers.element,
      this.verdict.element,
      make(
        'div',
        { class: 'live' },
        make('div', { class: 'stage' }, this.tools.element, t.element, this.overview.element),
        this.side,
      ),
    );
    new ResizeObserver(() => this.resize()).observe(t.element);
  }

  enter() {}

  leave() {}

  hover(id) {
    this.hovered = id;
  }

  select(id) {
    this.app.selected = id === this.app.selected ? null : id;
    this.side.classList.toggle('has-card', this.app.selected !== null);
    this.figures();
  }

  // Select, and bring its lane to now.
  show(id) {
    if (this.app.selected !== id) this.select(id);
    this.view.follow = true;
  }

  laneAt(y) {
    return y < this.lanes.height ? this.lanes.laneAt(y) : null;
  }

  toggle() {
    this.view.follow = !this.view.follow;
    this.figures();
  }

  zoom(factor, x) {
    if (this.view.zoom(factor, x)) this.redraw();
  }

  redraw() {
    this.lanes.track.invalidate();
    for (const track of this.bands) track.invalidate();
  }

  theme(colours) {
    this.colours = colours;
    this.lanes.theme(colours);
    this.redraw();
    this.describe();
    if (this.rem) {
      this.overview.build(colours);
      this.minutes();
    }
  }

  // The run changed: what its legend and bounds say follows.
  describe() {
    legend(this.tools.legend, this.colours, this.store.run);
  }

  resize() {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const width = this.stage.score.clientWidth;
    if (!width || !this.colours) return;
    if (!this.rem) this.view.scale *= rem / 13;
    this.rem = rem;
    this.view.width = width;
    for (const part of [this.lanes, this.kv, this.ended, this.numbers]) part.measure(rem);
    this.bands.forEach((track, i) => track.resize(this.stage.strips[i].host.clientHeight));
    this.lanes.fit();
    this.redraw();
    if (this.overview.plots.length) this.overview.resize();
    else this.overview.build(this.colours);
  }

  get moving() {
    return this.app.linkState === 'disconnected' || this.store.live.size > 0;
  }

  frame(now_ms, elapsed_ms) {
    const { store, view, app } = this,
      { columns } = store;
    if (!this.rem) return;
    if (store.run && columns.count > columns.first) {
      view.tick(app.clock.edgeNs(now_ms, columns.newestNs, this.moving), elapsed_ms);
      this.lanes.track.frame(columns);
      for (const track of this.bands) track.frame(columns);
      this.cursor();
      this.silence();
      this.axis.slide();
    }
    const due = this.jobs.filter((job) => job.due_ms <= now_ms);
    const job = due.sort((a, b) => a.due_ms - b.due_ms)[0];
    if (!job) return;
    job.due_ms = now_ms + job.every_ms;
    job.run();
  }

  // The iteration that the figures show: the one under the cursor, or null for now.
  cursor() {
    const { view, stage, store } = this,
      { columns } = store;
    const ns = view.cursor ?? view.pinned;
    this.cursorIndex = ns === null ? null : columns.find(ns);
    stage.hair.style.display = ns === null ? 'none' : 'block';
    if (ns === null) return;
    const s = columns.slot(this.cursorIndex);
    const x0 = view.x(columns.begin_at_ns[s]),
      x1 = view.x(columns.end_at_ns[s]);
    stage.hair.style.transform = `translateX(${Math.round(x0)}px)`;
    stage.hair.style.width = Math.max(1, x1 - x0) + 'px';
    write(stage.hairText, timeOfDay(columns.end_at_ns[s], store.run.started_unix_us, 3));
  }

  // From the moment the link broke there is no data, and that stretch grows with the clock.
  silence() {
    const { gone } = this.stage,
      down = this.app.linkState === 'disconnected';
    if (down !== this.down) {
      this.down = down;
      gone.style.display = down ? 'grid' : 'none';
    }
    if (!down) return;
    const from = Math.max(this.store.columns.newestNs, this.app.heardNs);
    gone.style.width = Math.max(0, this.view.width - this.view.x(from)) + 'px';
  }

  maps() {
    const { store, view, colours, stage, app } = this,
      { columns } = store;
    this.empty.update(this.emptiness(), store.run, colours);
    if (!store.run) return;
    if (columns.count === columns.first) {
      this.kv.update(store, columns.last, colours, {});
      return;
    }
    const past = this.cursorIndex !== null && this.cursorIndex !== undefined;
    const index = past ? Math.max(columns.first, this.cursorIndex) : columns.last;
    const s = columns.slot(index);
    this.fitScales();
    this.lanes.fit();
    this.lanes.drawGutter(this.hovered ?? app.selected, past ? index : null);
    this.lanes.label();
    this.axis.draw(store.run.started_unix_us, this.rem);
    const marks = { selected: app.selected, hovered: this.hovered, past };
    this.kv.update(store, index, colours, marks);
    this.queue.update(store, index, app.selected, past);
    stage.strips.forEach((strip, i) =>
      FIGURES[i](columns, s).forEach((value, k) => write(strip.values[k], value)),
    );
    if (!past) {
      const { used, cached } = store.present();
      [used, cached].forEach((n, k) => write(stage.strips[2].values[k], int(n)));
    }
    write(stage.span, `${duration((view.width / view.scale) * 1e3)} wide`);
    const { beyond } = store.lanes;
    stage.beyond.hidden = beyond.length === 0;
    const runs = beyond.some((r) => r.state === 'running');
    write(stage.beyond, `+ ${int(beyond.length)} ${runs ? 'beyond the last lane' : 'more wait'}`);
    stage.beyond.style.top = this.lanes.height - 30 + 'px';
    this.lanes.light(store.requests.get(this.hovered ?? app.selected));
  }

  emptiness() {
    if (this.store.columns.count) return null;
    if (this.app.linkState !== 'live') return 'connecting';
    return this.store.run ? 'ready' : 'starting';
  }

  fitScales() {
    const { view, store, stage } = this;
    const bars = [strips.batchTokens, strips.tileMs];
    const budget = store.columns.token_budget[store.columns.slot(store.columns.last)];
    bars.forEach((measure, i) => {
      const most = strips.highest(store.columns, view.left, view.right, measure);
      const cap = i === 0 ? budget : Infinity;
      if (this.scales[i].fit(most, performance.now(), cap)) this.bands[i].invalidate();
    });
    const [tokens, step] = this.scales;
    const whole = tokens.full >= budget;
    write(stage.strips[0].bound, `${whole ? '' : int(tokens.full) + ' of '}budget ${int(budget)}`);
    write(stage.strips[1].bound, duration(step.full));
    write(stage.strips[2].bound, `${int(store.run.kv_blocks_total)} blocks`);
  }

  figures() {
    const { app, store, colours } = this,
      now_ms = performance.now();
    if (!colours) return;
    const link = app.linkState,
      silent_ns = app.clock.silentNs(now_ms);
    this.verdict.update(store, { link, silent_ns }, now_ms);
    this.card.update(store.requests.get(app.selected));
    app.tryIt.update();
    if (!store.run) return;
    const down = link === 'disconnected';
    const now_ns = down ? app.heardNs : app.nowNs(now_ms);
    this.numbers.update(store, colours, now_ns, down);
    write(this.tools.follow, this.view.follow ? 'Pause' : 'Follow');
    this.tools.follow.setAttribute('aria-pressed', String(!this.view.follow));
    this.pill(now_ms, down);
  }

  // Why the picture stands still, and for how long it has.
  pill(now_ms, down) {
    const { store, view, app } = this,
      { pill } = this.stage;
    const newest = store.columns.newestNs;
    const late_ns = newest - view.right + (view.lead / view.scale) * 1e9;
    const idle_ns = app.clock.nowNs(now_ms) - newest;
    let words = '';
    const behind = late_ns > NOTICED_NS ? `, ${duration(late_ns / 1e6)} behind` : '';
    if (!view.follow) words = 'paused' + behind;
    else if (view.hold && behind) words = 'held while you look' + behind;
    else if (newest && !this.moving && !down && idle_ns > IDLE_PILL_NS) {
      words = `idle since ${timeOfDay(newest, store.run.started_unix_us)}`;
    }
    pill.hidden = !words;
    write(pill, words);
  }

  minutes() {
    const { app, store } = this;
    this.ended.measure(this.rem ?? 13);
    this.ended.update(store);
    if (!store.run || !this.overview.plots.length) return;
    const now_ns = app.nowNs(performance.now());
    const heard_ns = app.linkState === 'disconnected' ? app.heardNs : now_ns;
    this.overview.update(store, this.view, { now_ns, heard_ns });
  }

  // Another run: instants begin at zero again, so nothing drawn may stay.
  anew() {
    this.hovered = null;
    this.cursorIndex = null;
    this.side.classList.remove('has-card');
    this.redraw();
    if (!this.rem) return;
    this.lanes.drawGutter(null, null);
    this.lanes.label();
    for (const part of [this.numbers, this.kv, this.queue, this.overview, this.axis]) part.clear();
    for (const { values, bound } of this.stage.strips) {
      for (const element of [...values, bound]) write(element, '');
    }
    this.figures();
    this.minutes();
  }
}
