// Owns: where a post-mortem's answers come from: the server's record or one recorded file, asked in
// the same words. Called by: everything here that asks. It comes again a few times when the server
// says that too much is asked at once, and never otherwise.

const TRIES = 6;
const WAIT_MS = 350;

export class Asker {
  // ask(method, path, body, {signal}) resolves to JSON; file is a recorded file's name, or null.
  constructor(ask, file = null) {
    Object.assign(this, { ask, file });
    this.root = file ? `telemetry/incidents/${encodeURIComponent(file)}` : 'telemetry';
  }

  sql(sql, parameters = [], { signal } = {}) {
    return this.again('POST', `${this.root}/sql`, { sql, parameters }, signal);
  }

  named(name, body, { signal } = {}) {
    return this.again('POST', `${this.root}/queries/${encodeURIComponent(name)}`, body, signal);
  }

  async again(method, path, body, signal) {
    for (let tries = 1; ; tries++) {
      try {
        return await this.ask(method, path, body, { signal });
      } catch (error) {
        if (error.status !== 429 || tries === TRIES || signal?.aborted) throw error;
        await new Promise((resolve) => setTimeout(resolve, WAIT_MS * tries));
      }
    }
  }
}

// Rows as objects, for the few that the page itself reads.
export const objects = ({ columns, rows }) =>
  rows.map((row) => Object.fromEntries(columns.map(({ name }, i) => [name, row[i]])));
