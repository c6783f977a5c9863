// Owns: a toy continuous-batching engine on a virtual clock that emits records with the fields of
// telemetry/records.py, so that the page can be tested and developed without a model. Called by:
// the tests beside it and serve.js. Same seed, same records: it reads no clock and no Math.random.
// It is a fixture, not a second scheduler: only the shape and consistency of records count.

import { STORIES, newRequest, random } from './traffic.js';

const MS = 1e6;

const DEFAULTS = {
  seed: 11,
  seqs_max: 32,
  token_budget: 256,
  kv_blocks_total: 660,
  block_tokens: 16,
  load: 1,
  story: 'tour',
  started_unix_us: 1764424980e6,
  cost: { fixed: 13 * MS, p: 0.125 * MS, d: 0.33 * MS, c: 260 },
};

export class Simulation {
  constructor(options = {}) {
    this.o = { ...DEFAULTS, ...options };
    this.traffic = random(this.o.seed);
    this.noise = random(this.o.seed + 1);
    this.now = 0;
    this.step = 0;
    this.next = 1;
    this.free = this.o.kv_blocks_total;
    this.cached = 0;
    this.waiting = [];
    this.running = [];
    this.planned = [];
    this.warm = false;
    this.scene = -1;
    this.sceneEnds = 0;
    this.nextArrival = 0;
    this.cancels = 0;
    this.out = [];
    this.enterScene();
  }

  run() {
    const { o } = this;
    return {
      replica: 'a',
      schema_version: 1,
      started_unix_us: o.started_unix_us,
      model: 'SmolLM2-135M-Instruct',
      parameters: 134515008,
      dtype: 'float32',
      device: 'cpu',
      backend: 'sdpa',
      backend_refusals: '[]',
      policy: 'decode_first',
      batching: 'continuous',
      kv_blocks_total: o.kv_blocks_total,
      block_tokens: o.block_tokens,
      batch_tokens_max: o.token_budget,
      seqs_max: o.seqs_max,
      model_len_max: 8192,
      buckets: [],
      config: '{}',
      revision: '0.1.0',
    };
  }

  get live() {
    return [...this.running, ...this.waiting].map((r) => r.start);
  }

  // Records as [kind, record] until an instant, in the order the server would publish them.
  advance(until_ns) {
    this.out = [];
    while (this.now < until_ns) this.iterate();
    return this.out;
  }

  enterScene() {
    const scenes = STORIES[this.o.story];
    const [seconds, rate, prompt, output, extra = {}] = scenes[++this.scene % scenes.length];
    const start = this.sceneEnds;
    this.sceneEnds = start + seconds * 1e9;
    Object.assign(this, { rate: rate * this.o.load, prompt, output, sceneStart: start });
    for (const at of extra.long ?? []) {
      this.planned.push({ at: start + at * 1e9, prompt: 3600 + Math.floor(this.traffic() * 900) });
    }
    for (let i = 0; i < (extra.burst ?? 0) * this.o.load; i++) {
      this.planned.push({ at: start + 6e8 + i * 4 * MS });
    }
    this.cancels = (extra.cancel ?? 0) * this.o.load;
  }

  spread(median, sigma) {
    const u = this.traffic() + this.traffic() + this.traffic() - 1.5;
    return Math.max(4, Math.round(median * Math.exp(sigma * 2 * u)));
  }

  arrive(at, prompt) {
    const shared = !prompt && this.traffic() < 0.45 ? 64 : 0;
    const own = prompt ?? this.spread(this.prompt, 0.55);
    const id = this.next++;
    const r = newRequest({
      id,
      at,
      shared,
      prompt: own + shared,
      received: at - Math.round((1.2 + this.traffic() * 1.6) * MS),
      target: prompt ? 40 : this.spread(this.output, 0.5),
      cancelAt: !prompt && this.traffic() < 0.03 ? at + (0.3 + this.traffic() * 1.5) * 1e9 : 0,
    });
    this.waiting.push(r);
    this.out.push(['request_start', r.start]);
  }

  inbox() {
    for (;;) {
      if (this.now >= this.sceneEnds) this.enterScene();
      if (this.planned.length && this.planned[0].at <= this.now) {
        const { at, prompt } = this.planned.shift();
        this.arrive(at, prompt);
        continue;
      }
      if (this.nextArrival > this.now) break;
      this.arrive(this.nextArrival);
      this.nextArrival += 1 + Math.round((-Math.log(1 - this.traffic()) / this.rate) * 1e9);
    }
    if (this.cancels > 0 && this.now > this.sceneStart + 4e8 && this.running.length > 4) {
      for (const r of this.running.slice(2, 2 + this.cancels)) r.cancelAt = this.now;
      this.cancels = 0;
    }
  }

  get available() {
    return this.free + this.cached;
  }

  take(r, blocks) {
    const fresh = Math.min(this.free, blocks);
    this.free -= fresh;
    this.cached -= blocks - fresh;
    r.blocks += blocks;
  }

  give(r, keep) {
    const kept = keep ? Math.min(r.blocks, Math.ceil(r.prompt / this.o.block_tokens)) : 0;
    this.cached += kept;
    this.free += r.blocks - kept;
    r.blocks = 0;
  }

  plan() {
    const p = {
      rows: [],
      requests: [],
      start_positions: [],
      token_counts: [],
      kv_block_counts: [],
      admitted: [],
      admitted_cached_tokens: [],
      passed_over: [],
      passed_over_reasons: [],
      preempted: [],
      preempted_causes: [],
      preempted_blocks: [],
      preempted_lost_tokens: [],
      preempted_beneficiaries: [],
      prefill_tokens: 0,
      decode_tokens: 0,
      admission_stop: 'no_waiting',
      admission_blocker: null,
      left: this.o.token_budget,
    };
    const chunk = (r) => r.known - r.computed > 1;
    const order = [...this.running].sort((a, b) => chunk(a) - chunk(b) || a.id - b.id);
    for (const r of order) {
      if (r.state !== 'running') continue;
      if (p.left > 0) this.place(p, r);
      else {
        p.passed_over.push(r.id);
        p.passed_over_reasons.push('budget');
      }
    }
    this.admit(p);
    return p;
  }

  place(p, r) {
    const tokens = Math.min(r.known - r.computed, p.left);
    const need = Math.ceil((r.computed + tokens + 1) / this.o.block_tokens) - r.blocks;
    while (need > 0 && this.available < need) {
      const victims = this.running.filter((v) => !p.rows.includes(v));
      const victim = victims.reduce((a, b) => (b.id > a.id ? b : a), r);
      this.preempt(p, victim, r);
      if (victim === r) return;
    }
    if (need > 0) this.take(r, need);
    this.schedule(p, r, tokens);
  }

  schedule(p, r, tokens) {
    const decode = r.computed >= Math.max(r.prompt, r.highest) ? tokens : 0;
    p.rows.push(r);
    p.requests.push(r.id);
    p.start_positions.push(r.computed);
    p.token_counts.push(tokens);
    p.kv_block_counts.push(r.blocks);
    p.left -= tokens;
    p.decode_tokens += decode;
    p.prefill_tokens += tokens - decode;
    r.iterations++;
    r.firstScheduled ??= this.now;
  }

  preempt(p, victim, heir) {
    p.preempted.push(victim.id);
    p.preempted_causes.push('kv');
    p.preempted_blocks.push(victim.blocks);
    p.preempted_lost_tokens.push(victim.computed);
    p.preempted_beneficiaries.push(heir.id);
    victim.lost += victim.computed;
    victim.computed = 0;
    victim.state = 'preempted';
    victim.preemptions++;
    this.give(victim, false);
    this.running.splice(this.running.indexOf(victim), 1);
    this.waiting.push(victim);
    this.waiting.sort((a, b) => a.id - b.id);
  }

  check(p, r) {
    if (this.running.length >= this.o.seqs_max) return 'seqs';
    if (p.left < 1) return 'budget';
    const mark = this.running.length ? Math.ceil(this.o.kv_blocks_total / 100) : 0;
    const need = Math.ceil((r.known + 1) / this.o.block_tokens);
    return p.preempted.length || this.available - mark < need ? 'kv' : null;
  }

  admit(p) {
    while (this.waiting.length) {
      const [r] = this.waiting;
      const why = this.check(p, r);
      if (why) {
        Object.assign(p, { admission_stop: why, admission_blocker: r.id });
        return;
      }
      this.waiting.shift();
      this.take(r, Math.ceil((r.known + 1) / this.o.block_tokens));
      const hit = r.shared && this.warm ? r.shared : 0;
      if (r.shared) this.warm = true;
      r.computed = hit;
      r.hits += hit;
      r.state = 'running';
      r.admitted ??= this.now;
      this.running.push(r);
      p.admitted.push(r.id);
      p.admitted_cached_tokens.push(hit);
      this.schedule(p, r, Math.min(r.known - r.computed, p.left));
    }
  }

  iterate() {
    this.inbox();
    const finished = this.abortDue();
    if (!this.running.length && !this.waiting.length) {
      this.now = Math.min(this.nextArrival, this.planned[0]?.at ?? Infinity, this.sceneEnds);
      return;
    }
    const begin = this.now,
      p = this.plan(),
      { cost } = this.o;
    const context = p.start_positions.reduce((sum, s, i) => sum + s + p.token_counts[i], 0);
    const work = p.prefill_tokens * cost.p + p.decode_tokens * cost.d + context * cost.c;
    const jitter = 1 + (this.noise() - 0.5) * 0.06;
    const device = p.rows.length ? Math.round((cost.fixed + work) * jitter) : 0;
    const t = {
      plan_ns: Math.round((0.05 + p.rows.length * 0.004) * MS),
      launch_ns: Math.round((0.25 + this.noise() * 0.1) * MS),
      wait_ns: device,
      commit_ns: Math.round((0.06 + p.rows.length * 0.006) * MS),
      gap_ns: Math.round((0.12 + this.noise() * 0.15) * MS),
    };
    this.now = begin + t.plan_ns + t.launch_ns + t.wait_ns + t.commit_ns + t.gap_ns;
    const peak = this.o.kv_blocks_total - this.available;
    this.commit(p, finished);
    this.step++;
    this.out.push(['iteration', this.iteration({ p, begin, t, device, context, peak, finished })]);
    for (const r of finished) this.out.push(['request_end', this.end(r)]);
  }

  abortDue() {
    const gone = [...this.waiting, ...this.running].filter(
      (r) => r.cancelAt && r.cancelAt <= this.now,
    );
    for (const r of gone) this.finish(r, 'cancelled', []);
    return gone;
  }

  finish(r, finish, finished) {
    r.finish = finish;
    r.ended = this.now;
    this.give(r, finish !== 'cancelled');
    this.running = this.running.filter((other) => other !== r);
    this.waiting = this.waiting.filter((other) => other !== r);
    finished.push(r);
  }

  commit(p, finished) {
    p.rows.forEach((r, i) => {
      if (r.state !== 'running') return;
      r.computed += p.token_counts[i];
      r.highest = Math.max(r.highest, r.computed);
      if (r.computed < r.known) return;
      r.output++;
      r.known++;
      r.firstToken ??= this.now;
      if (r.output >= r.target) this.finish(r, r.target % 3 ? 'stop' : 'length', finished);
    });
  }

  iteration({ p, begin, t, device, context, peak, finished }) {
    const { rows, left, ...lists } = p;
    return {
      step: this.step,
      begin_at_ns: begin,
      end_at_ns: this.now,
      ...t,
      device_ns: device,
      emit_ns: 9000,
      running: this.running.length,
      waiting: this.waiting.length,
      token_budget: this.o.token_budget,
      padding_tokens: 0,
      idle_rows: 0,
      bucket: 0,
      graph: false,
      kv_blocks_used: this.o.kv_blocks_total - this.available,
      kv_blocks_cached: this.cached,
      kv_tokens: context,
      kv_blocks_peak: peak,
      allocation_failures: p.preempted.length,
      lost_before: 0,
      ...lists,
      finished: finished.map((r) => r.id),
    };
  }

  end(r) {
    return {
      request: r.id,
      request_id: r.start.request_id,
      external_id: null,
      parent_id: null,
      tenant: r.start.tenant,
      received_at_ns: r.received,
      arrived_at_ns: r.start.arrived_at_ns,
      admitted_at_ns: r.admitted ?? null,
      first_scheduled_at_ns: r.firstScheduled ?? null,
      prefill_finished_at_ns: r.firstToken ?? null,
      first_token_at_ns: r.firstToken ?? null,
      cancel_requested_at_ns: r.finish === 'cancelled' ? r.cancelAt : null,
      decided_at_ns: r.ended,
      freed_at_ns: r.ended,
      released_at_ns: r.ended + 40000,
      prompt_tokens: r.prompt,
      cached_tokens: r.hits,
      output_tokens: r.output,
      recomputed_tokens: r.lost,
      dropped_tokens: 0,
      wasted_tokens: 0,
      preemptions: r.preemptions,
      iterations: r.iterations,
      finish: r.finish,
      cancel_cause: r.finish === 'cancelled' ? 'client' : null,
      error: null,
    };
  }
}
