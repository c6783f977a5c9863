// Owns: the link to `/telemetry/stream`: one EventSource, the position reached, and what to do
// when it breaks. Called by: main.js. It hands each record to `onRecord(kind, record, runId)`
// exactly once and each change of the link to `onState(state)`. It must never touch the store.
// The browser resumes by itself with Last-Event-ID; once it gives up, a new EventSource carries
// the position in the query, since a header cannot be set on one.

export const RECORD_KINDS = Object.freeze([
  'run',
  'request_start',
  'iteration',
  'request_end',
  'rejection',
  'fault',
]);
const BACKOFF_MS = [500, 1000, 2000, 4000];
const CLOSED = 2;

// "<run_id>.<seq>", or null for anything else.
export function parsePosition(id) {
  const [, runId, digits] = /^(.+)\.(\d{1,15})$/.exec(id) ?? [];
  return runId ? { runId, seq: Number(digits) } : null;
}

export class Source {
  constructor({ url, onRecord, onState, connect, timers = window }) {
    Object.assign(this, { url, onRecord, onState, timers });
    this.connect = connect ?? ((to) => new EventSource(to));
    this.position = '';
    this.runId = null;
    this.seq = -1;
    this.attempt = 0;
    this.asleep = false;
    this.duplicates = 0;
    this.state = 'connecting';
  }

  open() {
    this.close();
    const to = new URL(this.url);
    if (this.position) to.searchParams.set('last_event_id', this.position);
    const stream = (this.stream = this.connect(to.href));
    for (const kind of ['hello', 'lost', ...RECORD_KINDS]) {
      stream.addEventListener(kind, (event) => this.receive(kind, event));
    }
    stream.addEventListener('open', () => this.become('live'));
    stream.addEventListener('error', () => this.broke(stream));
  }

  close() {
    this.timers.clearTimeout(this.timer);
    if (this.stream) this.stream.close();
    this.stream = null;
  }

  // A tab that nobody sees gives its connection back: a browser has six a server, for all tabs.
  sleep() {
    this.asleep = true;
    this.close();
  }

  wake() {
    if (!this.asleep) return;
    this.asleep = false;
    this.become('connecting');
    this.retryNow();
  }

  retryNow() {
    this.attempt = 0;
    this.open();
  }

  broke(stream) {
    if (stream !== this.stream) return;
    this.become('disconnected');
    if (stream.readyState !== CLOSED) return; // the browser tries again by itself
    const delay_ms = BACKOFF_MS[Math.min(this.attempt++, BACKOFF_MS.length - 1)];
    this.timer = this.timers.setTimeout(() => this.open(), delay_ms);
  }

  receive(kind, event) {
    this.attempt = 0;
    this.become('live');
    const at = parsePosition(event.lastEventId);
    if (at) {
      const again = kind !== 'hello' && at.runId === this.runId && at.seq <= this.seq;
      this.position = event.lastEventId;
      if (again) {
        this.duplicates++;
        return;
      }
      this.runId = at.runId;
      this.seq = at.seq;
    }
    this.onRecord(kind, JSON.parse(event.data), this.runId);
  }

  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.onState(state);
  }
}
