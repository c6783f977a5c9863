// Owns: what the traffic generator is to send and when: arrivals at a rate, lengths around their
// medians, bursts. Called by: generator.js. Pure and seeded: the same settings and seed are the
// same day. It must never look at a clock; it is told how much time has passed.

export const LIMITS = Object.freeze({
  rate: { min: 0, max: 200, step: 0.1, unit: 'requests/s' },
  prompt: { min: 1, max: 32768, step: 1, unit: 'tokens' },
  output: { min: 1, max: 32768, step: 1, unit: 'tokens' },
  burst: { min: 1, max: 256, step: 1, unit: 'requests' },
  every: { min: 0, max: 600, step: 1, unit: 's' },
  long: { min: 0, max: 131072, step: 1, unit: 'tokens' },
});

export const PRESETS = Object.freeze({
  steady: { rate: 1, prompt: 60, output: 60, burst: 1, every: 0, long: 0 },
  bursts: { rate: 0.5, prompt: 60, output: 60, burst: 12, every: 10, long: 0 },
  bully: { rate: 1, prompt: 40, output: 80, burst: 1, every: 8, long: 1500 },
  flood: { rate: 20, prompt: 120, output: 120, burst: 1, every: 0, long: 0 },
});

export function random(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// Settings within their limits; what is no number is what the field names.
export function checked(given) {
  const settings = {},
    wrong = [];
  for (const [name, { min, max }] of Object.entries(LIMITS)) {
    const value = Number(given[name]);
    if (given[name] === '' || !Number.isFinite(value) || value < min || value > max) {
      wrong.push(name);
    }
    settings[name] = Math.min(max, Math.max(min, Number.isFinite(value) ? value : min));
  }
  return { settings, wrong };
}

// Arrivals are a Poisson stream, lengths log-normal around their medians (sigma 0.6). Each `every`
// seconds `burst` requests come at once; with `long` one prompt of that length comes instead.
export class Schedule {
  constructor(settings, seed = 1) {
    this.settings = settings;
    this.random = random(seed);
    this.at_s = 0;
    this.next_s = this.pause();
    this.nextBurst_s = settings.every || Infinity;
  }

  pause() {
    const { rate } = this.settings;
    return rate > 0 ? -Math.log(1 - this.random()) / rate : Infinity;
  }

  length(median) {
    const radius = Math.sqrt(-2 * Math.log(1 - this.random()));
    const normal = radius * Math.cos(2 * Math.PI * this.random());
    return Math.max(1, Math.round(median * Math.exp(0.6 * normal)));
  }

  one() {
    const { prompt, output } = this.settings;
    return { prompt: this.length(prompt), output: this.length(output) };
  }

  // What has come due in the next `seconds`, at most `most`; what is beyond is counted as skipped.
  advance(seconds, most) {
    const { burst, every, long, output } = this.settings;
    const due = [];
    this.at_s += seconds;
    let skipped = 0;
    const add = (request) => (due.length < most ? due.push(request) : skipped++);
    while (this.next_s <= this.at_s) {
      add(this.one());
      this.next_s += this.pause();
    }
    while (this.nextBurst_s <= this.at_s) {
      if (long > 0) add({ prompt: long, output: Math.max(1, Math.round(output / 4)) });
      else for (let i = 0; i < burst; i++) add(this.one());
      this.nextBurst_s += every;
    }
    return { due, skipped };
  }
}

const WORDS = (
  'time year people way day man thing woman life child world school state family student group ' +
  'country problem hand part place case week company system program question work number night ' +
  'point home water room mother area money story fact month lot right study book eye job word'
).split(' ');

// Text of about so many tokens: common words are one token each in most vocabularies. No two begin
// alike, so that the prefix cache has nothing to find.
export function promptOf(tokens, next) {
  const words = [];
  for (let i = 0; i < tokens; i++) words.push(WORDS[Math.floor(next() * WORDS.length)]);
  return words.join(' ');
}

// The completions to ask for, cut to what the context holds.
export function bodiesOf(due, run, next) {
  return due.map(({ prompt, output }) => {
    const most = Math.max(1, Math.min(output, Math.floor(run.model_len_max / 2)));
    const room = Math.max(1, Math.min(prompt, Math.floor((run.model_len_max - most) * 0.8)));
    return { model: run.model, prompt: promptOf(room, next), max_tokens: most, ignore_eos: true };
  });
}
