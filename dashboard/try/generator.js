// Owns: the traffic generator while it runs: it tells the server each tenth of a second what its
// schedule has due, and learns how the answers went. Called by: page.js; it goes on while another
// view is shown, and stops with the page. It must never send faster than its bound, nor make up
// for time in which the tab slept.

import { Schedule, bodiesOf, random } from './schedule.js';

const TICK_MS = 100;
const LOOK_MS = 1000;
const AWAY_MS = 1000; // a longer pause between ticks is a tab that slept: nothing is due for it
const AT_ONCE = 64;

export class Generator {
  // ask(method, path, body) resolves to JSON or throws; run() answers the record of the engine.
  constructor({ ask, run, onChange }) {
    Object.assign(this, { ask, run, onChange });
    this.schedule = null;
    this.told = null; // {in_flight, answered: {status: count}, beyond}
    this.sent = this.skipped = 0;
    this.error = null;
  }

  get running() {
    return this.schedule !== null;
  }

  start(settings, seed) {
    this.schedule = new Schedule(settings, seed);
    this.words = random(seed + 1);
    this.sent = this.skipped = 0;
    this.base = null;
    this.error = null;
    this.before_ms = null;
    this.onChange();
  }

  stop() {
    this.schedule = null;
    this.onChange();
  }

  // Ends what is in flight, too.
  async clear() {
    this.stop();
    await this.call('DELETE');
  }

  // Called each frame, in whatever view.
  frame(now_ms) {
    if (!this.running) {
      const busy = this.told?.in_flight > 0;
      if (busy && now_ms - (this.looked_ms ?? 0) > LOOK_MS) this.look(now_ms);
      return;
    }
    this.before_ms ??= now_ms;
    const passed_ms = now_ms - this.before_ms;
    if (passed_ms < TICK_MS || this.calling) return;
    this.before_ms = now_ms;
    const { due, skipped } = this.schedule.advance(Math.min(passed_ms, AWAY_MS) / 1e3, AT_ONCE);
    this.skipped += skipped;
    if (due.length) this.send(due);
    else if (now_ms - (this.looked_ms ?? 0) > LOOK_MS) this.look(now_ms);
  }

  look(now_ms) {
    this.looked_ms = now_ms;
    return this.call('GET');
  }

  async send(due) {
    const run = this.run();
    if (!run) return;
    this.sent += due.length;
    await this.call('POST', { requests: bodiesOf(due, run, this.words) });
  }

  async call(method, body) {
    if (this.calling) return;
    this.calling = true;
    try {
      this.told = await this.ask(method, 'traffic', body);
      this.base ??= this.told.answered;
      this.error = null;
    } catch (error) {
      this.error = error.message;
      if (error.status === 403) this.schedule = null;
    } finally {
      this.calling = false;
      this.onChange();
    }
  }

  // Answers since the start, by status; null before the first word of the server.
  answers() {
    if (!this.told) return null;
    const found = {};
    for (const [status, count] of Object.entries(this.told.answered)) {
      const since = count - (this.base?.[status] ?? 0);
      if (since > 0) found[status] = since;
    }
    return found;
  }
}
