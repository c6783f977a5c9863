// Owns: the page: theme, keys, the link to the record stream, and the frame loop. Called by:
// index.html. It is the only module that may touch location, localStorage or
// requestAnimationFrame (try/box.js and live/empty.js read the page's own address).

import { ask } from './api.js';
import { Clock } from './live/clock.js';
import { make, put } from './dom.js';
import { bindKeys } from './keys.js';
import { Live } from './live/page.js';
import { Compare } from './compare/page.js';
import { Notice } from './live/notice.js';
import { palette } from './palette.js';
import { PostMortem } from './post-mortem/page.js';
import { RequestPage } from './request/page.js';
import { Router } from './router.js';
import { Session } from './session.js';
import { RECORD_KINDS, Source } from './live/source.js';
import { Help } from './live/empty.js';
import { Store } from './score/store.js';
import { Generator } from './try/generator.js';
import { TryPage } from './try/page.js';
import { Mine, TryIt, isLoopback } from './try/box.js';
import { View } from './score/view.js';

const HIDDEN_MS = 30_000; // so long out of sight, and the stream is let go
const byId = (id) => document.getElementById(id);
const STREAM = new URL('../telemetry/stream', import.meta.url);
STREAM.searchParams.set('kinds', RECORD_KINDS.join(','));
STREAM.searchParams.set('hz', '20');
STREAM.searchParams.set('past', '100000'); // what the server's ring still holds

function write(hash, replaces) {
  if (replaces) history.replaceState(null, '', hash);
  else location.hash = hash;
}

class App {
  constructor() {
    this.store = new Store();
    this.view = new View();
    this.clock = new Clock();
    this.mine = new Mine();
    this.maySend = null; // known once the server said so
    this.awaited = null; // id of a request of ours whose lane is to be lit once it is known
    this.linkState = 'connecting';
    this.heardNs = 0; // server time of the last contact
    this.session = new Session({ url: new URL('../session', import.meta.url).href });
    this.source = new Source({
      url: STREAM.href,
      onRecord: (kind, record, runId) => this.receive(kind, record, runId),
      onState: (state) => this.link(state),
    });
    this.boxes = [];
    this.tryIt = this.promptBox();
    this.live = new Live(this);
    this.generator = new Generator({
      ask,
      run: () => this.store.run,
      onChange: () => this.router.made.get('try')?.update(),
    });
    this.router = new Router({
      pages: this.pages(),
      host: byId('view'),
      nav: byId('pages'),
      address: { read: () => location.hash, write },
      onShow: (name, title) => this.entitle(name, title),
    });
    this.help = new Help({ colours: () => this.colours, run: () => this.store.run });
    this.notice = new Notice({
      word: byId('link'),
      banner: byId('banner'),
      onRetry: () => this.source.retryNow(),
    });
    byId('theme').addEventListener('click', () => this.flip());
    byId('help').addEventListener('click', () => this.help.toggle());
    addEventListener('hashchange', () => this.router.show(this.colours));
    document.addEventListener('visibilitychange', () => this.seen(!document.hidden));
    bindKeys(this);
  }

  // Out of sight for a while, the page sleeps; seen again, it goes on where it was.
  seen(visible) {
    clearTimeout(this.sleepy);
    if (!visible) this.sleepy = setTimeout(() => this.sleep(), HIDDEN_MS);
    else this.source.wake();
  }

  sleep() {
    this.store.asleep = true;
    this.source.sleep();
  }

  // The table of pages; the first one is shown where the address names none.
  pages() {
    return [
      { name: 'live', title: 'Live', create: () => this.live },
      { name: 'request', title: 'Requests', create: () => new RequestPage(this, { ask }) },
      {
        name: 'post-mortem',
        title: 'Post-mortem',
        keeps: true,
        create: () => new PostMortem(this),
      },
      { name: 'compare', title: 'Compare', keeps: true, create: () => new Compare(this) },
      { name: 'try', title: 'Try it', create: () => this.tryPage() },
    ];
  }

  promptBox(title) {
    const box = new TryIt({
      title,
      run: () => this.store.run,
      find: (requestId) => this.store.find(requestId),
      mine: this.mine,
      onJoin: (requestId) => {
        this.awaited = requestId;
      },
    });
    this.boxes.push(box);
    if (this.maySend !== null) box.allow(this.maySend);
    return box;
  }

  tryPage() {
    const { generator } = this;
    return new TryPage({ box: this.promptBox('A prompt'), generator, allowed: this.maySend });
  }

  get selected() {
    return this.live.score.selected;
  }

  // A request's own view.
  open(r) {
    const id = r?.start?.request_id;
    if (id) this.go('request', { id });
  }

  // A request's stretch in the score: in Live while its records are here, else of the past.
  showInScore({ run_id, request_id, from_ns, to_ns }) {
    const { store, live } = this,
      { columns } = store;
    const r = run_id === store.runId ? store.find(request_id) : null;
    if (r && store.requests.has(r.id) && columns.has(columns.find(to_ns)) && r.seen >= 0) {
      this.go('live', {});
      if (live.score.selected !== r.id) live.score.select(r.id);
      this.view.reach(from_ns, to_ns);
      return;
    }
    const zero_us = run_id === store.runId ? store.run?.started_unix_us : null;
    const at = (ns) => new Date((zero_us + ns / 1e3) / 1e3).toISOString();
    const window = zero_us ? { from: at(from_ns - 5e8), to: at(to_ns + 5e8) } : {};
    this.go('post-mortem', { run: run_id, ...window });
  }

  go(name, params) {
    this.router.go(name, params);
  }

  // This view as a link.
  link() {
    return location.href;
  }

  entitle(name, title) {
    document.title = `${title} · Iterscope`;
    byId('view').dataset.page = name;
  }

  start() {
    const root = document.documentElement;
    const preferred = matchMedia('(prefers-color-scheme: light)').matches ? 'light' : 'dark';
    const asked = new URLSearchParams(location.search).get('theme');
    root.dataset.theme = asked ?? localStorage.getItem('theme') ?? preferred;
    this.paint();
    this.router.show(this.colours);
    this.source.open();
    this.knock(0);
    requestAnimationFrame((now_ms) => this.loop(now_ms, now_ms));
  }

  receive(kind, record, runId) {
    const now_ms = performance.now(),
      { store } = this;
    this.clock.hear(now_ms);
    const anew = kind === 'hello' && runId !== store.runId;
    if (anew) {
      this.clock.clear();
      this.clock.hear(now_ms);
      this.view.clear();
    }
    store.ingest(kind, record, runId);
    if (kind === 'iteration') store.asleep = false;
    if (anew) this.live.anew();
    if (kind === 'iteration') this.clock.note(record.end_at_ns, now_ms);
    if (kind === 'hello' || kind === 'run') this.describe();
    if (kind === 'request_start' && this.awaited) this.light(record);
  }

  // Our own request joins: its lane is lit.
  light({ request, request_id, parent_id }) {
    if (request_id !== this.awaited && parent_id !== this.awaited) return;
    this.awaited = null;
    this.live.score.show(request);
  }

  link(state) {
    const now_ms = performance.now();
    if (state === 'disconnected') this.heardNs = this.nowNs(now_ms);
    this.linkState = state;
    this.notice.update(this.store, state);
    this.live.figures();
  }

  // Where a key is wanted: the way out is shown, and without a session the login page is.
  async knock(now_ms) {
    const state = await this.session.look(now_ms);
    if (state) this.allow(state);
    if (!state?.key_needed) return;
    byId('account').hidden = !state.signed_in;
    if (!state.signed_in) location.reload();
  }

  // Whether prompts may be sent from here: where the server says so, or on its own machine.
  allow({ try_it }) {
    this.maySend = try_it === 'on' || (try_it === 'loopback' && isLoopback(location.hostname));
    for (const box of this.boxes) box.allow(this.maySend);
    this.router.made.get('try')?.allow(this.maySend);
  }

  // The server's time: learned from records, and before the first one from the wall clocks.
  nowNs(now_ms) {
    if (this.clock.known) return this.clock.nowNs(now_ms);
    const { run } = this.store;
    return run ? Math.max(0, (Date.now() * 1e3 - run.started_unix_us) * 1e3) : 0;
  }

  loop(now_ms, before_ms) {
    this.router.page.frame(now_ms, Math.min(250, now_ms - before_ms));
    this.generator.frame(now_ms);
    if (now_ms - (this.noticedMs ?? 0) > 250) {
      this.noticedMs = now_ms;
      this.notice.update(this.store, this.linkState);
      if (this.linkState === 'disconnected') this.knock(now_ms);
      if (this.awaited) {
        const r = this.store.find(this.awaited);
        if (r) this.light(r.start);
      }
    }
    requestAnimationFrame((next_ms) => this.loop(next_ms, now_ms));
  }

  flip() {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === 'dark' ? 'light' : 'dark';
    localStorage.setItem('theme', root.dataset.theme);
    this.paint();
  }

  paint() {
    this.colours = palette();
    this.live.theme(this.colours);
    this.router.page?.theme(this.colours);
  }

  describe() {
    const { run } = this.store;
    this.live.describe();
    if (!run) {
      put(byId('run'));
      return;
    }
    const facts = [
      ['', run.model],
      ['', `${run.dtype} on ${run.device}`],
      ['policy', run.policy],
      ['batching', run.batching],
    ];
    put(
      byId('run'),
      facts.map(([name, value]) =>
        make('span', {}, name && name + ' ', make('b', { text: value })),
      ),
    );
  }
}

window.iterscope = new App();
window.iterscope.start();
