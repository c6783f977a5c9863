// Owns: the Post-mortem view: whose record, which run, which window, and what is shown of it, all
// of it in the address. Called by: main.js through the table of pages. Parts are told what changed
// and only that: a click on a query loads no picture, a new window asks the lints again.

import { ask, urlOf } from '../api.js';
import { make, put } from '../dom.js';
import { EMPTY, instantText, readAddress, writeAddress } from './address.js';
import { Asker, objects } from './asker.js';
import { Console } from './console.js';
import { bodyOf } from './inputs.js';
import { Menu } from './menu.js';
import { BUCKETS, NOTED, OVERVIEW, RUNS, bucketsOf } from './overview.js';
import { Past } from './past.js';
import { Picker } from './picker.js';
import { Range, lengthWords } from './range.js';
import { send } from './send.js';
import { longAs, moved, newest, within } from './window.js';

const LINTS_AFTER_MS = 400;

export class PostMortem {
  // app: {router, go(page, params)}
  constructor(app) {
    this.app = app;
    this.state = EMPTY;
    this.runs = [];
    this.queries = null;
    this.leaving = null;
    this.asker = new Asker(ask);
    this.picker = new Picker(this.pickerActs());
    this.range = new Range({
      beside: this.picker.lengthsElement,
      onChoose: (window, done) => this.choose(window, done),
    });
    this.menu = new Menu({ onPick: (picked) => this.pick(picked) });
    this.past = new Past({
      onWindow: (window) => this.choose(window, true),
      onOpen: (id) => app.go('request', { id }),
    });
    this.console = new Console({
      asker: () => this.asker,
      place: () => this.state,
      on: {
        edit: (sql) => this.note({ query: null, values: {}, sql }),
        values: (values) => this.note({ values }),
        free: (sql) => this.pick({ show: 'query', query: null, sql }),
      },
    });
    this.said = make('div', { class: 'pm-said', role: 'alert', hidden: true });
    this.content = make('div', { class: 'pm-content' });
    this.element = make(
      'div',
      { class: 'pm' },
      make('h1', { class: 'unseen', text: 'Post-mortem' }),
      this.picker.element,
      this.range.element,
      this.said,
      make('div', { class: 'pm-body' }, this.menu.element, this.content),
    );
  }

  pickerActs() {
    return {
      file: (file) =>
        this.apply({ ...EMPTY, file, show: this.state.show, query: this.state.query }),
      run: (run) => this.apply({ ...this.state, run, from_us: null, to_us: null }),
      window: (window) => this.choose(within(window, this.extent), true),
      length: (us) => this.choose(within(longAs(this.window, us), this.extent), true),
      move: (share) => this.choose(within(moved(this.window, share), this.extent), true),
      send: (file) => this.take(file),
      copy: () => this.copy(),
      compare: () => this.compare(),
    };
  }

  // ---- what the router calls

  enter(params) {
    // The router leaves and enters anew when only the address changed: nothing is to be ended then.
    const stayed = this.leaving !== null;
    clearTimeout(this.leaving);
    this.leaving = null;
    this.entered = true;
    const asked = readAddress(params);
    const same = JSON.stringify(asked) === JSON.stringify(this.state);
    if (same && this.run && !this.broken) {
      if (!stayed) this.present();
    } else this.apply(asked, { replaces: true });
  }

  // The score that keys act on, while it is shown.
  get score() {
    return this.state.show === 'score' ? this.past.score : null;
  }

  leave() {
    this.leaving = setTimeout(() => {
      this.leaving = null;
      this.entered = false;
      if (this.past.leave()) this.stale = true;
      this.console.leave();
    });
  }

  theme(colours) {
    this.past.theme(colours);
    this.range.theme(colours);
    this.console.theme(colours);
  }

  resize() {
    if (this.state.show === 'score') this.past.resize();
  }

  frame(now_ms, elapsed_ms) {
    if (this.state.show === 'score') this.past.frame(now_ms, elapsed_ms);
  }

  // ---- the state

  get window() {
    return this.state.from_us === null ? null : [this.state.from_us, this.state.to_us];
  }

  // Writes what changed into the address and nothing else.
  note(changed) {
    this.state = Object.freeze({ ...this.state, ...changed });
    this.app.router.note(writeAddress(this.state), { replaces: true });
  }

  // Another state: whatever differs is loaded. `replaces`: the address was only made whole.
  async apply(asked, { replaces = false } = {}) {
    const turn = (this.turn = Symbol('turn'));
    const moves = asked.file !== this.state.file || !this.runs.length || this.broken;
    try {
      if (moves) await this.open(asked.file, turn);
      if (this.turn !== turn) return;
      if (!this.runs.length) {
        this.state = asked;
        this.nothing();
        return;
      }
      this.settle(asked, replaces, moves);
    } catch (error) {
      if (this.turn === turn) this.fail(error, asked);
    }
  }

  settle(asked, replaces, moves) {
    const whole = this.completed(asked);
    this.say(this.missing(asked, whole));
    const before = this.state,
      run = this.run;
    this.state = whole;
    this.run = this.runs.find(({ run_id }) => run_id === whole.run);
    const other = moves || run?.run_id !== whole.run;
    const elsewhere = other || before.from_us !== whole.from_us || before.to_us !== whole.to_us;
    if (this.entered) this.app.router.note(writeAddress(whole), { replaces });
    this.picker.runs(this.runs, whole.run);
    this.picker.window(this.window);
    this.range.choose(this.window);
    this.range.say(lengthWords(this.window));
    if (other) this.survey();
    if (elsewhere) this.stale = true;
    this.present();
    if (elsewhere) this.lint();
  }

  // The run and window of an address, made whole.
  completed(asked) {
    const found =
      this.runs.find(({ run_id }) => run_id === asked.run) ??
      (asked.from_us === null
        ? null
        : this.runs.find((run) => run.first_us <= asked.to_us && asked.from_us <= run.last_us)) ??
      this.runs[0];
    const extent = [found.first_us, found.last_us];
    const wanted = asked.from_us === null ? newest(extent) : [asked.from_us, asked.to_us];
    const outside = wanted[1] <= extent[0] || wanted[0] >= extent[1];
    const [from_us, to_us] = outside ? newest(extent) : wanted;
    return Object.freeze({ ...asked, run: found.run_id, from_us, to_us });
  }

  // What an address names that is not on record: a link may outlive what it shows.
  missing(asked, whole) {
    const found = [];
    const shown = `${lengthWords([whole.from_us, whole.to_us])} are shown`;
    if (asked.run && asked.run !== whole.run) found.push(`The run ${asked.run} is not on record`);
    else if (asked.from_us !== null && asked.from_us !== whole.from_us) {
      found.push('Nothing of the window that was asked for is on record');
    }
    if (found.length) found[0] += `: another’s ${shown}.`;
    const known = !asked.query || this.queries.some(({ name }) => name === asked.query);
    if (!known) found.push(`There is no question named ${asked.query}.`);
    return found.join(' ');
  }

  get extent() {
    return [this.run.first_us, this.run.last_us];
  }

  // ---- loading

  async open(file, turn) {
    this.asker = new Asker(ask, file);
    this.broken = false;
    this.said.hidden = true;
    this.menu.forget();
    this.element.setAttribute('aria-busy', 'true');
    const [runs, listed, queries, schema] = await Promise.all([
      this.asker.sql(RUNS),
      ask('GET', 'telemetry/incidents'),
      this.queries ?? ask('GET', 'telemetry/queries').then((body) => body.queries),
      this.schema ?? ask('GET', 'telemetry/schema'),
    ]);
    if (this.turn !== turn) return;
    this.element.removeAttribute('aria-busy');
    this.runs = objects(runs).map((run) => ({
      ...run,
      first_us: run.started_unix_us + Math.floor(run.first_ns / 1e3),
      last_us: run.started_unix_us + Math.ceil(run.last_ns / 1e3) + 1,
    }));
    this.picker.files(listed.data, file);
    this.bytesMax = listed.bytes_max;
    if (!this.queries) this.menu.list(queries);
    Object.assign(this, { queries, schema });
    this.console.describe(schema);
  }

  // The run seen small, behind the window.
  async survey() {
    const { run } = this;
    this.range.show(this.extent, null);
    this.range.choose(this.window);
    const place = [run.run_id, Math.floor(run.first_ns), Math.max(run.last_ns, run.first_ns + 1)];
    try {
      const [rows, noted] = await Promise.all([
        this.asker.sql(OVERVIEW, place),
        this.asker.sql(NOTED, place),
      ]);
      if (run !== this.run) return;
      const instants = objects(noted).map(({ kind, at_ns, words }) => {
        return { kind, words, at_us: run.started_unix_us + at_ns / 1e3 };
      });
      this.range.show(this.extent, bucketsOf(rows, place[2] - place[1]), instants);
    } catch (error) {
      if (run === this.run)
        this.range.say(`The run’s overview could not be read: ${error.message}`);
    }
  }

  // Queue by time within the window, to offer a narrower one.
  queueIn([from, to]) {
    const { data, extent } = this.range;
    if (!data || !extent) return [];
    const at = (i) => extent[0] + ((i + 0.5) / BUCKETS) * (extent[1] - extent[0]);
    return [...data.waiting]
      .map((weight, i) => ({ at_us: at(i), weight }))
      .filter(({ at_us }) => at_us >= from && at_us <= to);
  }

  // Shows the score or the question; the picture is loaded when it is looked at.
  present() {
    const { state } = this;
    this.menu.current(state);
    const score = state.show === 'score';
    const shown = score ? this.past.element : this.console.element;
    if (this.content.firstChild !== shown) put(this.content, shown);
    if (!score) {
      const query = this.queries.find(({ name }) => name === state.query) ?? null;
      this.console.show(query, state);
      return;
    }
    this.past.resize();
    if (!this.stale) return;
    this.stale = false;
    const window = { ...state, started_us: this.run.started_unix_us };
    this.past.show(this.asker, window, this.queueIn(this.window));
  }

  // Once the window stands still.
  lint() {
    clearTimeout(this.linting);
    this.lints?.abort();
    const { signal } = (this.lints = new AbortController());
    const { asker, state } = this;
    this.linting = setTimeout(() => {
      this.menu.ask(asker, (query) => bodyOf(query, {}, state), signal);
    }, LINTS_AFTER_MS);
  }

  // ---- what people do

  choose([from_us, to_us], done) {
    if (!this.run) return;
    const whole = { ...this.state, from_us: Math.round(from_us), to_us: Math.round(to_us) };
    this.picker.window([from_us, to_us]);
    this.range.say(lengthWords([from_us, to_us]));
    if (done) this.apply(Object.freeze(whole));
  }

  pick({ show, query, sql = this.state.sql }) {
    this.apply(Object.freeze({ ...this.state, show, query, values: {}, sql: query ? null : sql }));
  }

  async take(file) {
    this.say('');
    const onProgress = (share) =>
      this.picker.say(share < 1 ? `Sending… ${Math.floor(share * 100)} %` : 'Opening it…');
    onProgress(0);
    try {
      const url = urlOf('telemetry/incidents');
      const { name } = await send(url, file, { bytesMax: this.bytesMax, onProgress });
      this.picker.say('');
      this.apply({ ...EMPTY, file: name });
    } catch (error) {
      this.picker.say('');
      this.say(`${file.name}: ${error.message}`);
    }
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.app.link());
      this.picker.say('Copied.');
    } catch {
      this.picker.say('The address bar has the link.');
    }
  }

  // This window against the one of equal length before it.
  compare() {
    if (!this.window) return;
    const [from, to] = this.window;
    const text = (a, b) => `${instantText(a)}/${instantText(b)}`;
    const { file } = this.state;
    const sides = { a: text(from - (to - from), from), b: text(from, to) };
    this.app.go('compare', { ...sides, 'a.file': file, 'b.file': file });
  }

  // ---- when there is nothing to show

  say(words) {
    this.said.hidden = !words;
    put(this.said, make('span', { text: words }));
  }

  nothing() {
    this.run = null;
    this.picker.runs([], null);
    this.picker.window(null);
    put(
      this.content,
      make(
        'div',
        { class: 'pm-blank' },
        make('h2', { text: 'Nothing is on record here yet.' }),
        make('p', { class: 'muted', text: 'The first engine that starts begins a run.' }),
      ),
    );
  }

  fail(error, asked) {
    this.broken = true;
    this.state = asked;
    this.element.removeAttribute('aria-busy');
    put(
      this.content,
      make(
        'div',
        { class: 'pm-blank' },
        make('h2', { text: 'The record could not be read.' }),
        make('p', { class: 'muted', text: error.message }),
        make('button', { class: 'quiet', text: 'Try again', onclick: () => this.apply(asked) }),
        asked.file &&
          make('button', {
            class: 'quiet',
            text: 'This server’s history',
            onclick: () => this.apply(EMPTY),
          }),
      ),
    );
  }
}
