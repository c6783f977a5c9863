// Owns: the box that sends a prompt and shows the answer as it comes, so that one sees one's own
// request join the batch. Called by: main.js and the pages. Off, with its reason, unless the server
// lets its page send: others' servers are not ours to load. At most one answer and one
// burst run at a time. It must never touch the store; it reads it to describe the request.

import { burst, complete } from './completion.js';
import { make, put, write } from '../dom.js';
import { duration, plural } from '../format.js';
import { firstTokenNs } from '../score/request.js';

const MINE_MAX = 64;
const CHAT = new URL('../../v1/chat/completions', import.meta.url);
const TEXT = new URL('../../v1/completions', import.meta.url);

export function isLoopback(hostname) {
  return hostname === 'localhost' || hostname === '[::1]' || /^127(\.\d+){3}$/.test(hostname);
}

// The requests this page has sent, by the id that the server gave; the oldest are forgotten.
export class Mine {
  constructor() {
    this.ids = new Set();
  }

  add(id) {
    this.ids.add(id);
    if (this.ids.size > MINE_MAX) this.ids.delete(this.ids.values().next().value);
  }

  has(r) {
    return !!r.start && (this.ids.has(r.start.request_id) || this.ids.has(r.start.parent_id));
  }
}

export class TryIt {
  // find(requestId) answers the store's request or null; onJoin(requestId) tells the page.
  constructor({ run, find, mine, onJoin, title = 'Try it' }) {
    Object.assign(this, { run, find, mine, onJoin, title });
    this.allowed = null;
    this.abort = null;
    this.element = make('section', { class: 'panel try' });
    this.allow(null);
  }

  // Whether this page may send, which the server says a moment after the page opened.
  allow(allowed) {
    if (allowed === this.allowed && this.heading) return;
    this.stop();
    this.allowed = allowed;
    this.heading = make('h2', {}, this.title, make('span', { class: 'spacer' }));
    put(this.element, this.heading);
    const why = 'Sending prompts from this page is off (see --try-it).';
    if (allowed) this.build();
    else if (allowed === false) this.element.append(make('p', { class: 'hush', text: why }));
  }

  build() {
    this.prompt = make('textarea', {
      id: 'prompt',
      rows: 2,
      spellcheck: 'false',
      onkeydown: (e) => {
        if (e.key !== 'Enter' || e.shiftKey || e.isComposing) return;
        e.preventDefault();
        this.send();
      },
    });
    this.prompt.value = 'Tell me a short story about a scheduler.';
    this.limit = make('input', { id: 'limit', type: 'number', min: 1, max: 4096, value: 128 });
    this.sendButton = make('button', {
      class: 'primary',
      text: 'Send',
      title: 'Enter',
      onclick: () => (this.abort ? this.stop() : this.send()),
    });
    this.burstButton = make('button', {
      class: 'quiet',
      text: 'Send 16 at once',
      title: 'Send 16 prompts of 24 to 1,500 characters, in four requests',
      onclick: () => this.sendBurst(),
    });
    this.answer = make('div', { class: 'answer', tabindex: 0, role: 'region' });
    this.answer.setAttribute('aria-label', 'Answer');
    this.status = make('p', { class: 'hush try-status', role: 'status' });
    this.heading.append(this.burstButton);
    this.element.append(
      make('label', { class: 'unseen', for: 'prompt', text: 'Prompt' }),
      this.prompt,
      make(
        'div',
        { class: 'try-row' },
        make('label', { for: 'limit', text: 'max tokens' }),
        this.limit,
        make('span', { class: 'spacer' }),
        this.sendButton,
      ),
      this.answer,
      this.status,
    );
  }

  focus() {
    if (this.allowed) this.prompt.focus();
  }

  stop() {
    this.abort?.abort();
  }

  async send() {
    const run = this.run();
    if (this.abort || !run) return;
    const content = this.prompt.value.trim();
    if (!content) return;
    const abort = (this.abort = new AbortController());
    write(this.sendButton, 'Stop');
    write(this.answer, '');
    write(this.status, 'Sent; waiting for the engine.');
    this.requestId = this.finish = null;
    const max_tokens = Math.max(1, Math.floor(Number(this.limit.value)) || 1);
    const body = { model: run.model, messages: [{ role: 'user', content }], max_tokens };
    try {
      const { finish } = await complete({
        url: CHAT,
        body,
        signal: abort.signal,
        onStart: (id) => this.joined(id),
        onText: (text) => this.grow(text),
      });
      this.finish = finish[0];
    } catch (error) {
      if (abort.signal.aborted) this.finish = 'cancelled';
      else this.fail(error);
    } finally {
      this.abort = null;
      write(this.sendButton, 'Send');
      this.update();
    }
  }

  fail(error) {
    this.requestId = null; // what is on record no longer tells the whole story
    write(this.status, error.message);
  }

  joined(id) {
    if (!id) return;
    this.requestId = id;
    this.mine.add(id);
    this.onJoin(id);
  }

  grow(text) {
    const { answer } = this;
    const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 8;
    answer.append(text); // a text node: nothing in it can become markup
    if (atEnd) answer.scrollTop = answer.scrollHeight;
  }

  // What the records say of the request: called by its page, since its end comes after the answer.
  update() {
    if (!this.requestId) return;
    const r = this.find(this.requestId);
    const parts = [r?.name, r?.end?.finish ?? this.finish ?? r?.state];
    if (r) {
      parts.push(plural(r.output, 'token'));
      const first_ns = firstTokenNs(r);
      if (first_ns !== null) parts.push(`first after ${duration(first_ns / 1e6)}`);
    }
    write(this.status, parts.filter(Boolean).join(' · '));
  }

  async sendBurst() {
    const run = this.run();
    if (!run || this.burstAbort) {
      this.burstAbort?.abort();
      return;
    }
    const abort = (this.burstAbort = new AbortController());
    write(this.burstButton, 'Stop 16');
    const sends = burst(run).map((body) =>
      complete({
        url: TEXT,
        body,
        signal: abort.signal,
        onStart: (id) => id && this.mine.add(id),
        onText: () => {},
      }),
    );
    const results = await Promise.allSettled(sends);
    const failed = results.find((result) => result.status === 'rejected');
    if (failed && !abort.signal.aborted) this.fail(failed.reason);
    this.burstAbort = null;
    write(this.burstButton, 'Send 16 at once');
  }
}
