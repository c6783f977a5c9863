// Owns: a past window as the score shows it, with the panels beside it: loading, drawn, too much to
// draw, nothing there, failed. Called by: page.js. The picture is that of the Live view: a Store of
// its own, fed from SQL. One window is loaded at a time; a newer one ends it.

import { make, put, write } from '../dom.js';
import { duration, int, plural } from '../format.js';
import { Ended } from '../live/ended.js';
import { Card } from '../score/card.js';
import { KvMap } from '../score/kvmap.js';
import { Queue } from '../score/queue.js';
import { Score } from '../score/score.js';
import { Store } from '../score/store.js';
import { View } from '../score/view.js';
import { load } from './load.js';
import { DRAWN_MOST, narrower } from './window.js';

export class Past {
  // onWindow([from_us, to_us]) when a narrower one is chosen; onOpen(request_id).
  constructor({ onWindow, onOpen }) {
    Object.assign(this, { onWindow, onOpen });
    this.store = new Store();
    this.view = new View({ past: true });
    const onPick = (id) => this.score.show(id),
      onHover = (id) => this.score.hover(id);
    this.score = new Score({
      store: this.store,
      view: this.view,
      past: true,
      onSelect: () => this.panels(),
      onHover: () => {},
    });
    this.card = new Card({ onClear: () => this.score.select(null), onOpen: () => this.open() });
    this.kv = new KvMap({ onPick, onHover });
    this.queue = new Queue({ onPick, onHover });
    this.ended = new Ended({ onPick });
    this.note = make('div', { class: 'past-note', hidden: true });
    this.message = make('div', { class: 'past-message', role: 'status', hidden: true });
    this.side = make(
      'aside',
      { class: 'side', 'aria-label': 'Details' },
      this.card.element,
      this.kv.element,
      this.queue.element,
      this.ended.element,
    );
    this.element = make(
      'div',
      { class: 'past' },
      this.note,
      make('div', { class: 'live' }, this.score.element, this.side),
      this.message,
    );
    this.score.every(125, () => this.maps());
    this.score.every(500, () => this.panels());
  }

  get drawn() {
    return this.score.drawable;
  }

  open() {
    const id = this.store.requests.get(this.score.selected)?.start?.request_id;
    if (id) this.onOpen(id);
  }

  // window: {run, started_us, from_us, to_us}; buckets: {at_us, weight} of a longest queue.
  async show(asker, window, buckets = []) {
    this.abort?.abort();
    const { signal } = (this.abort = new AbortController());
    const ns = (us) => (us - window.started_us) * 1e3;
    const place = { run: window.run, from_ns: ns(window.from_us), to_ns: ns(window.to_us) };
    this.say('busy', make('p', { text: 'Reading the window…' }), this.bar());
    try {
      const onProgress = (share) => {
        if (!signal.aborted) this.progress.style.width = `${share * 100}%`;
      };
      const { counts, store } = await load(asker, place, { signal, onProgress });
      if (signal.aborted) return;
      if (!store) this.tooMuch(window, counts, buckets);
      else if (!counts.iterations) this.nothing();
      else this.draw(store, place);
    } catch (error) {
      if (!signal.aborted) this.failed(error, () => this.show(asker, window, buckets));
    }
  }

  // Ends what is being read; true if there was anything.
  leave() {
    const reading = this.element.dataset.state === 'busy';
    if (reading) this.abort?.abort();
    return reading;
  }

  draw(store, { from_ns, to_ns }) {
    this.store = store;
    this.message.hidden = true;
    this.element.dataset.state = 'drawn';
    this.score.use(store);
    this.view.clear();
    this.view.span(from_ns, to_ns);
    this.score.redraw();
    const said = [
      store.lostHere && `${plural(store.lostHere, 'record')} never reached the history here`,
      store.lostAtSource && `the engine dropped ${plural(store.lostAtSource, 'iteration')}`,
    ].filter(Boolean);
    this.note.hidden = !said.length;
    write(this.note, said.length ? `▲ ${said.join('; ')}: hatched, and not guessed.` : '');
    this.panels();
  }

  // ---- what is said instead of a picture

  say(state, ...content) {
    this.element.dataset.state = state;
    put(this.message, make('div', {}, content));
    this.message.hidden = false;
    this.note.hidden = true;
  }

  bar() {
    this.progress = make('i');
    return make('div', { class: 'past-bar' }, this.progress);
  }

  nothing() {
    this.empty();
    this.say(
      'empty',
      make('h2', { text: 'No step of the engine is in this window.' }),
      make('p', {
        class: 'muted',
        text: 'It slept, or was not there. Choose another window above.',
      }),
    );
  }

  tooMuch(window, counts, buckets) {
    this.empty();
    const whole = [window.from_us, window.to_us];
    const offers = narrower(whole, counts, buckets);
    const length = duration((offers[0].window[1] - offers[0].window[0]) / 1e3);
    this.say(
      'much',
      make('h2', { text: 'This window holds more than one picture can.' }),
      make('p', {
        class: 'muted',
        text:
          `${plural(counts.iterations, 'iteration')} with ${plural(counts.slices, 'row')} of ` +
          `batches; ${int(DRAWN_MOST.iterations)} and ${int(DRAWN_MOST.slices)} can be drawn. ` +
          `The questions at the left answer for all of it. To see it, look at ${length}:`,
      }),
      make(
        'p',
        { class: 'offers-row' },
        offers.map((offer) =>
          make('button', {
            class: 'quiet',
            text: offer.words,
            onclick: () => this.onWindow(offer.window),
          }),
        ),
      ),
    );
  }

  failed(error, again) {
    this.say(
      'failed',
      make('h2', { text: 'The window could not be read.' }),
      make('p', { class: 'muted', text: error.message }),
      make('button', { class: 'quiet', text: 'Try again', onclick: again }),
    );
  }

  empty() {
    this.store = new Store();
    this.score.use(this.store);
  }

  // ---- drawing, in the page's turns

  theme(colours) {
    this.colours = colours;
    this.score.theme(colours);
  }

  resize() {
    this.score.resize();
    if (!this.score.rem) return;
    for (const part of [this.kv, this.ended]) part.measure(this.score.rem);
  }

  frame(now_ms, elapsed_ms) {
    if (this.score.sized !== this.sized) {
      this.resize();
      this.sized = this.score.sized;
    }
    this.score.frame(now_ms, elapsed_ms);
  }

  maps() {
    if (!this.drawn) return;
    const { store, score, colours } = this;
    const { index, past } = score.shown();
    const marks = { selected: score.selected, hovered: score.hovered, past };
    this.kv.update(store, index, colours, marks);
    this.queue.update(store, index, score.selected, past);
  }

  panels() {
    this.side.classList.toggle('has-card', this.score.selected !== null);
    this.card.update(this.store.requests.get(this.score.selected));
    if (this.drawn) this.ended.update(this.store);
  }
}
