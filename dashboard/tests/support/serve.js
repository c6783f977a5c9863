// Owns: a small server for developing the page without a model: its files, and /telemetry/stream
// as DESIGN section 4 describes it, fed by simulate.js in real time. Never part of the product.
// Run by hand: node dashboard/tests/support/serve.js [--port 8170] [--warm 60] [--lanes 256]
// POST /control/lose?s=1, /control/cut?s=3, /control/restart, /control/pause play what goes wrong.

import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { extname, join, normalize } from 'node:path';
import { parseArgs } from 'node:util';
import { Simulation } from './simulate.js';

const ROOT = join(import.meta.dirname, '../..');
const TYPE = {
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
};
const RING = 4096;

const frame = (event, id, body) =>
  `id: ${id}\nevent: ${event}\ndata: ${JSON.stringify(body)}\n\n`;

class Replay {
  constructor(options, warmSeconds) {
    this.options = options;
    this.readers = new Set();
    this.refuseUntil = 0;
    this.paused = false;
    this.begin(warmSeconds);
  }

  begin(warmSeconds) {
    this.runId = 'run' + Date.now().toString(36);
    const started_unix_us = (Date.now() - warmSeconds * 1e3) * 1e3;
    this.simulation = new Simulation({ ...this.options, started_unix_us });
    this.zero_ms = performance.now() - warmSeconds * 1e3;
    this.ring = [];
    this.seq = 0;
    this.dropUntil = 0;
    this.publish(this.simulation.advance(warmSeconds * 1e9));
  }

  publish(records) {
    for (const [kind, record] of records) {
      this.seq++;
      this.ring.push({ seq: this.seq, frame: frame(kind, `${this.runId}.${this.seq}`, record) });
    }
    if (this.ring.length > RING) this.ring.splice(0, this.ring.length - RING);
  }

  tick() {
    const now_ms = performance.now();
    if (!this.paused) this.publish(this.simulation.advance((now_ms - this.zero_ms) * 1e6));
    else this.zero_ms = now_ms - this.simulation.now / 1e6;
    if (now_ms < this.dropUntil) return;
    for (const reader of this.readers) this.send(reader);
  }

  send(reader) {
    const oldest = this.ring.length ? this.ring[0].seq : this.seq + 1;
    let out = '';
    if (reader.after + 1 < oldest) out += this.loss(reader, reader.after + 1, oldest - 1);
    const frames = this.ring.filter((entry) => entry.seq > reader.after);
    for (const { frame } of frames) out += frame;
    reader.after = this.seq;
    if (out) reader.response.write(out);
  }

  loss(reader, from, to) {
    const lost = { from, to, count: to - from + 1 };
    reader.after = this.seq;
    return frame('lost', `${this.runId}.${to}`, lost) + this.hello(0);
  }

  hello(lost) {
    const { simulation } = this;
    const hello = { schema_version: 1, run: simulation.run(), live: simulation.live, lost };
    return frame('hello', `${this.runId}.${this.seq}`, hello);
  }

  join(response, position) {
    const [runId, seq] = position ? position.split('.') : [];
    const reader = { response, after: this.seq };
    if (runId === this.runId && Number(seq) <= this.seq) reader.after = Number(seq);
    else response.write(this.hello(position ? 'unknown' : 0));
    this.readers.add(reader);
    response.on('close', () => this.readers.delete(reader));
  }

  // Everything in between is overwritten before the reader gets it.
  lose(seconds) {
    this.dropUntil = performance.now() + seconds * 1e3;
    setTimeout(() => this.ring.splice(0, this.ring.length - 4), seconds * 1e3 - 30);
  }

  cut(seconds) {
    this.refuseUntil = performance.now() + seconds * 1e3;
    for (const { response } of this.readers) response.destroy();
  }
}

const { values } = parseArgs({
  options: {
    port: { type: 'string', default: '8170' },
    warm: { type: 'string', default: '60' },
    lanes: { type: 'string', default: '32' },
  },
});
const factor = Number(values.lanes) / 32;
const options =
  factor === 1
    ? {}
    : {
        story: 'steady',
        load: factor * 5,
        seqs_max: 32 * factor,
        token_budget: 256 * factor,
        kv_blocks_total: 660 * factor,
        cost: { fixed: 2e6, p: 1e4, d: 1e4, c: 5 },
      };
const replay = new Replay(options, Number(values.warm));
setInterval(() => replay.tick(), 60);

function control(url) {
  const seconds = Number(url.searchParams.get('s') ?? 1);
  const act = {
    lose: () => replay.lose(seconds),
    cut: () => replay.cut(seconds),
    pause: () => (replay.paused = !replay.paused),
    restart: () => {
      replay.cut(1);
      replay.begin(1);
    },
  }[url.pathname.split('/')[2]];
  act?.();
}

const server = createServer(async (request, response) => {
  const url = new URL(request.url, 'http://127.0.0.1');
  if (performance.now() < replay.refuseUntil) return void request.socket.destroy();
  if (url.pathname.startsWith('/control/')) {
    control(url);
    return void response.end('ok\n');
  }
  if (url.pathname === '/telemetry/stream') {
    response.writeHead(200, {
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache',
    });
    const position = request.headers['last-event-id'] ?? url.searchParams.get('last_event_id');
    return void replay.join(response, position);
  }
  const name = normalize(url.pathname.replace(/^\/dashboard\//, '')) || 'index.html';
  const file = join(ROOT, name === '.' || name === '/' ? 'index.html' : name);
  try {
    const body = await readFile(file);
    response.writeHead(200, { 'content-type': TYPE[extname(file)] ?? 'text/plain' });
    response.end(body);
  } catch {
    response.writeHead(404);
    response.end();
  }
});
server.listen(Number(values.port), '127.0.0.1');
