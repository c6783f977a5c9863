// Owns: the Live view: six numbers, the verdict, the score of what runs now, and the panels beside
// it. Called by: main.js through the table of pages. It reads the store and writes only its
// score's view and selection. What is drawn when is the score's to order.

import { make } from '../dom.js';
import { duration, timeOfDay } from '../format.js';
import { Card } from '../score/card.js';
import { KvMap } from '../score/kvmap.js';
import { Queue } from '../score/queue.js';
import { Score } from '../score/score.js';
import { Empty } from './empty.js';
import { Ended } from './ended.js';
import { Numbers } from './numbers.js';
import { STUCK_NS, Verdict } from './verdict.js';

const IDLE_PILL_NS = 2e9;
const NOTICED_NS = 15e7;

export class Live {
  // app: {store, view, clock, mine, tryIt, linkState, heardNs, nowNs(now_ms), open(request)}
  constructor(app) {
    this.app = app;
    this.store = app.store;
    this.view = app.view;
    const { store, view, mine } = app;
    const onPick = (id) => this.score.select(id),
      onHover = (id) => this.score.hover(id);
    this.score = new Score({ store, view, mine, onSelect: (id) => this.picked(id) });
    this.numbers = new Numbers();
    this.verdict = new Verdict({ onPick: (id) => this.score.show(id) });
    this.kv = new KvMap({ onPick, onHover });
    this.queue = new Queue({ onPick, onHover });
    this.ended = new Ended({ onPick });
    this.card = new Card({
      onClear: () => this.score.select(null),
      onOpen: () => app.open(store.requests.get(this.score.selected)),
    });
    this.empty = new Empty();
    this.score.host.append(this.empty.element);
    this.build();
    this.score.every(125, () => this.maps());
    this.score.every(250, () => this.figures());
    this.score.every(1000, () => this.minutes());
  }

  build() {
    this.side = make(
      'aside',
      { class: 'side', 'aria-label': 'Details' },
      this.card.element,
      this.kv.element,
      this.queue.element,
      this.ended.element,
      this.app.tryIt.element,
    );
    this.element = make(
      'div',
      { class: 'view' },
      make('h1', { class: 'unseen', text: 'Live' }),
      this.numbers.element,
      this.verdict.element,
      make('div', { class: 'live' }, this.score.element, this.side),
    );
  }

  // ---- what the table of pages asks for

  enter() {}

  leave() {
    this.score.gestures.leave(); // the pointer goes without a word when the page changes
  }

  theme(colours) {
    this.colours = colours;
    this.score.theme(colours);
    this.minutes();
  }

  resize() {
    this.score.resize();
    const { rem } = this.score;
    if (rem) for (const part of [this.kv, this.ended, this.numbers]) part.measure(rem);
  }

  frame(now_ms, elapsed_ms) {
    const { app, store, score } = this;
    if (score.sized !== this.sized) {
      this.resize();
      this.sized = score.sized;
    }
    const edge_ns = app.clock.edgeNs(now_ms, store.columns.newestNs, this.moving);
    score.silence(...this.silent(now_ms));
    score.frame(now_ms, elapsed_ms, edge_ns);
  }

  // Since when nothing is on record that should be, and in what words; [null] where all is well.
  silent(now_ms) {
    const { app, store, score } = this,
      newest = store.columns.newestNs;
    if (!score.drawable) return [null];
    if (app.linkState === 'disconnected') return [Math.max(newest, app.heardNs), 'no data'];
    const still = store.stillNs(app.clock.nowNs(now_ms)) > STUCK_NS;
    return still ? [newest, 'no step has ended'] : [null];
  }

  // ---- selection

  picked(id) {
    this.side.classList.toggle('has-card', id !== null);
    this.figures();
  }

  get moving() {
    return this.app.linkState === 'disconnected' || this.store.live.size > 0;
  }

  // ---- what changes how often

  maps() {
    const { store, colours, score } = this,
      { columns } = store;
    this.empty.update(this.emptiness(), store.run, colours);
    if (!store.run) return;
    if (!score.drawable) {
      this.kv.update(store, columns.last, colours, {});
      return;
    }
    const { index, past } = score.shown();
    const marks = { selected: score.selected, hovered: score.hovered, past };
    this.kv.update(store, index, colours, marks);
    this.queue.update(store, index, score.selected, past);
  }

  emptiness() {
    if (this.store.columns.count) return null;
    if (this.app.linkState !== 'live') return 'connecting';
    return this.store.run ? 'ready' : 'starting';
  }

  figures() {
    const { app, store, colours } = this,
      now_ms = performance.now();
    if (!colours) return;
    const link = app.linkState,
      silent_ns = app.clock.silentNs(now_ms),
      still_ns = store.stillNs(app.clock.known ? app.clock.nowNs(now_ms) : 0);
    this.verdict.update(store, { link, silent_ns, still_ns }, now_ms);
    this.card.update(store.requests.get(this.score.selected));
    app.tryIt.update();
    if (!store.run) return;
    const down = link === 'disconnected';
    const now_ns = down ? app.heardNs : app.nowNs(now_ms);
    this.numbers.update(store, colours, now_ns, down);
    this.side.classList.toggle('stale', down);
    this.score.label();
    this.score.tell(this.still(now_ms, down));
  }

  // Why the picture stands still, and for how long it has.
  still(now_ms, down) {
    const { store, view, app } = this;
    const newest = store.columns.newestNs;
    const late_ns = newest - view.right + (view.lead / view.scale) * 1e9;
    const idle_ns = app.clock.nowNs(now_ms) - newest;
    const behind = late_ns > NOTICED_NS ? `, ${duration(late_ns / 1e6)} behind` : '';
    if (!view.follow) return 'paused' + behind;
    if (view.hold && behind) return 'held while you look' + behind;
    if (newest && !this.moving && !down && idle_ns > IDLE_PILL_NS) {
      return `idle since ${timeOfDay(newest, store.run.started_unix_us)}`;
    }
    return '';
  }

  minutes() {
    const { app, store } = this;
    const { rem } = this.score;
    if (rem) this.ended.measure(rem); // the panels above it change their height
    this.ended.update(store);
    const now_ns = app.nowNs(performance.now());
    const heard_ns = app.linkState === 'disconnected' ? app.heardNs : now_ns;
    this.score.minutes({ now_ns, heard_ns });
  }

  describe() {
    this.score.describe();
  }

  // Another run: instants begin at zero again, so nothing drawn may stay.
  anew() {
    this.score.selected = null;
    this.score.clear();
    this.side.classList.remove('has-card');
    if (!this.score.rem) return;
    for (const part of [this.numbers, this.kv, this.queue]) part.clear();
    this.figures();
    this.minutes();
  }
}
