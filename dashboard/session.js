// Owns: what this page knows of its session: whether the server wants a key, and whether this
// browser has shown one. Called by: main.js, at the start and while the link is down. It must never
// see the key or the cookie: the browser keeps the one, and nobody keeps the other.

const ASK_MS = 3000;

export class Session {
  constructor({ url, ask = (to) => fetch(to, { cache: 'no-store' }) }) {
    Object.assign(this, { url, ask });
    this.askedMs = -ASK_MS;
  }

  // {key_needed, signed_in}, or null: the server does not answer, or was asked just now.
  async look(now_ms) {
    if (now_ms - this.askedMs < ASK_MS) return null;
    this.askedMs = now_ms;
    try {
      const answer = await this.ask(this.url);
      return answer.ok ? await answer.json() : null;
    } catch {
      return null;
    }
  }
}
