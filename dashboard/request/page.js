// Owns: the Request view: which request is shown, when it is asked for again, and the states in
// between (choosing, loading, unknown, failing, running, ended). Called by: main.js through the
// table of pages. While a request runs it is asked for each second; once ended, until its receipt
// is settled. At most one explanation and its neighbours' are under way at a time.

import { make, put, write } from '../dom.js';
import { Finder } from './finder.js';
import {
  notes,
  promptOf,
  receipt,
  slowGaps,
  stateWords,
  summary,
  timeline,
  waterfall,
} from './parts.js';
import { Picture } from './picture.js';
import { neighbours } from './waterfall.js';

const AGAIN_MS = 1000;
const SETTLE_TRIES = 8;
const NEIGHBOURS = 3;
const SURE_MS = 4000;

export class RequestPage {
  // app: {store, go(page, params)}; ask(method, path, body) resolves to JSON or throws.
  constructor(app, { ask }) {
    this.app = app;
    this.ask = ask;
    this.id = null;
    this.serial = 0; // answers of an earlier request are dropped
    const onPick = (id) => this.app.go('request', { id });
    this.acts = {
      nameOf: (id) => this.nameOf(id),
      onPick,
      onGo: (at_ms) => this.picture.go(at_ms),
    };
    this.finder = new Finder({ ask, onPick, store: app.store });
    this.picture = new Picture({ nameOf: this.acts.nameOf });
    this.build();
  }

  build() {
    this.title = make('h1');
    this.chip = make('span', { class: 'chip' });
    this.sentence = make('p');
    this.cancelButton = make('button', { class: 'quiet', onclick: () => this.cancel() });
    this.scoreButton = make('button', {
      class: 'quiet',
      text: 'Show in score',
      onclick: () => this.showInScore(),
    });
    const others = make('button', {
      class: 'quiet',
      text: 'Other requests',
      onclick: () => this.app.go('request', {}),
    });
    this.said = make('p', { class: 'req-said', role: 'status' });
    this.notes = make('div', { class: 'req-notes' });
    this.falls = make('div');
    this.slow = make('div');
    this.side = make('aside', { class: 'req-side', 'aria-label': 'Timeline and receipt' });
    const words = 'green usual · blue mostly a neighbour’s prefill · a red cap is over its SLO';
    this.detail = make(
      'div',
      { class: 'req-detail' },
      make(
        'header',
        { class: 'req-head' },
        make('div', { class: 'req-title' }, this.title, this.chip),
        this.sentence,
        make('div', { class: 'req-acts' }, this.cancelButton, this.scoreButton, others),
      ),
      this.said,
      this.notes,
      make(
        'div',
        { class: 'req-grid' },
        make(
          'div',
          { class: 'req-main' },
          this.falls,
          make(
            'section',
            { class: 'req-panel fills' },
            make('h2', {}, 'Token by token', make('span', { class: 'when', text: words })),
            this.picture.element,
            this.slow,
          ),
        ),
        this.side,
      ),
    );
    this.element = make('div', { class: 'request' }, this.finder.element, this.detail);
  }

  // ---- what the table of pages asks for

  enter({ id = '' }) {
    this.serial++;
    this.id = id || null;
    this.body = null;
    this.settling = SETTLE_TRIES;
    this.finder.element.hidden = this.id !== null;
    this.detail.hidden = true;
    this.due_ms = 0;
    if (this.id === null) {
      this.finder.load();
      return;
    }
    this.picture.clear();
    this.others = [];
    put(this.notes);
    this.tell(`Asking for ${this.id} …`);
    this.detail.hidden = false;
    this.detail.classList.add('blank');
    write(this.title, this.nameOf(this.id));
    write(this.chip, 'loading');
    put(this.sentence);
    this.offerCancel(false);
  }

  leave() {
    this.serial++;
    this.id = null;
  }

  theme(colours) {
    this.picture.theme(colours);
  }

  resize() {
    this.picture.draw();
  }

  frame(now_ms) {
    if (this.id === null) {
      if (!this.finder.element.hidden) this.finder.frame(now_ms);
      return;
    }
    if (this.asking || now_ms < this.due_ms) return;
    this.due_ms = now_ms + AGAIN_MS;
    this.load(this.serial, now_ms);
  }

  // ---- loading

  async load(serial, now_ms) {
    this.asking = true;
    try {
      const body = await this.ask('GET', 'v1/requests/' + encodeURIComponent(this.id));
      if (serial !== this.serial) return;
      this.tell('');
      this.show(body);
      const others = await this.neighbours(body);
      if (serial !== this.serial) return;
      this.others = others;
      this.picture.show(body, others);
      if (body.state === 'finished') this.settle(body, now_ms);
    } catch (error) {
      if (serial === this.serial) this.fail(error, now_ms);
    } finally {
      this.asking = false;
    }
  }

  // The shares are on record a moment after the end.
  settle(body, now_ms) {
    const settled = body.receipt.device_ms !== null && body.receipt.bytes !== null;
    this.due_ms = settled || this.settling-- <= 0 ? Infinity : now_ms + AGAIN_MS;
  }

  fail(error, now_ms) {
    if (error.status === 404) {
      this.due_ms = Infinity;
      this.tell('No request on record has this id. It may be older than what this server keeps.');
      write(this.chip, 'unknown');
      return;
    }
    this.due_ms = now_ms + 3 * AGAIN_MS;
    this.tell(`${this.body ? 'This is not fresh' : 'It cannot be shown yet'}: ${error.message}`);
  }

  async neighbours(body) {
    const worst = neighbours(body, NEIGHBOURS);
    const known = new Map(this.others.map((other) => [other.body.request_id, other]));
    const asked = worst.map(async ({ request_id }) => {
      const before = known.get(request_id);
      if (before?.body.state === 'finished') return before;
      const other = await this.ask('GET', 'v1/requests/' + encodeURIComponent(request_id));
      if (other.run_id !== body.run_id) return null;
      return { body: other, shift_ms: (other.received_at_ns - body.received_at_ns) / 1e6 };
    });
    const found = await Promise.allSettled(asked);
    return found.map(({ value }) => value).filter(Boolean);
  }

  show(body) {
    this.body = body;
    this.detail.classList.remove('blank');
    write(this.title, this.nameOf(body.request_id));
    this.title.title = body.request_id;
    write(this.chip, stateWords(body));
    this.chip.dataset.state = body.state === 'finished' ? body.finish : body.state;
    put(this.sentence, summary(body));
    this.offerCancel(body.state !== 'finished');
    put(this.notes, notes(body, this.id).map((text) => make('p', { text })));
    replace(this.falls, waterfall(body, this.acts));
    this.picture.show(body, this.others);
    replace(this.slow, slowGaps(this.picture.strip.named, this.acts));
    replace(this.side, promptOf(body), timeline(body), receipt(body));
  }

  tell(text) {
    write(this.said, text);
    this.said.hidden = !text;
  }

  // ---- acts

  offerCancel(runs) {
    this.cancelButton.hidden = !runs;
    if (!runs || !this.sure) write(this.cancelButton, 'Cancel request');
  }

  // The first press asks, the second within four seconds does it.
  async cancel() {
    if (!this.sure) {
      this.sure = setTimeout(() => this.unsure(), SURE_MS);
      write(this.cancelButton, 'Press again to cancel it');
      return;
    }
    this.unsure();
    try {
      const id = this.body?.request_id ?? this.id;
      await this.ask('DELETE', 'v1/requests/' + encodeURIComponent(id));
      this.tell('Cancelled; its end will be on record in a moment.');
      this.due_ms = 0;
    } catch (error) {
      this.tell(error.status === 404 ? 'It had ended already.' : error.message);
    }
  }

  unsure() {
    clearTimeout(this.sure);
    this.sure = null;
    write(this.cancelButton, 'Cancel request');
  }

  showInScore() {
    const { body } = this;
    if (!body) return;
    this.app.showInScore({
      run_id: body.run_id,
      request_id: body.request_id,
      from_ns: body.received_at_ns,
      to_ns: body.received_at_ns + body.e2e_ms * 1e6,
    });
  }

  nameOf(id) {
    const known = this.app.store.find(id);
    if (known) return known.name;
    const [, kind, rest] = /^([a-z]+)-([0-9a-f]{16,}.*)$/.exec(id) ?? [];
    return rest ? `${kind}-…${rest.slice(-6)}` : id;
  }
}

// New content without losing the focus of who reads by keyboard: the same place gets it again.
function replace(host, ...children) {
  const path = pathTo(host, document.activeElement);
  put(host, ...children);
  if (path) path.reduce((element, i) => element?.children[i], host)?.focus();
}

function pathTo(host, element) {
  if (!element || element === host || !host.contains(element)) return null;
  const path = [];
  for (let at = element; at !== host; at = at.parentElement) {
    path.unshift([...at.parentElement.children].indexOf(at));
  }
  return path;
}
