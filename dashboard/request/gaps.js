// Owns: the model of the gap strip: a bar a token, as tall as the gap before it, how it is filled,
// and the words of the slow ones. Called by: picture.js and parts.js. Pure of pixels.
// A gap is named only when it stands out, by a cause that is not the request's own work.

import { duration, int } from '../format.js';
import { phrase } from './causes.js';

const STANDS_OUT = 2; // times the median
const MOSTLY = 0.6; // of a cause: whoever made so much of it is named alone
const CUT = 6; // a bar is cut at so many medians (or a quarter above the objective), and marked

export function quantile(sorted, q) {
  if (!sorted.length) return null;
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(q * sorted.length) - 1))];
}

function foreign({ causes }) {
  const others = causes.filter(({ cause }) => !cause.startsWith('own_'));
  return others.sort((a, b) => b.ms - a.ms)[0] ?? null;
}

function together({ requests, more }) {
  const tokens = requests.reduce((sum, one) => sum + one.tokens, more?.tokens ?? 0);
  return { count: requests.length + (more?.requests ?? 0), tokens };
}

// "41 ms: neighbour req-7's prefill, 512 tokens"
export function gapWords(gap, nameOf = (id) => id) {
  const worst = foreign(gap);
  const ms = duration(gap.ms);
  if (!worst) return `${ms}: ${phrase('own_decode')}`;
  const [who] = worst.requests ?? [];
  if (!who) return `${ms}: ${phrase(worst.cause)}`;
  const name = nameOf(who.request_id);
  if (worst.cause.startsWith('neighbour_')) {
    const what = worst.cause.slice('neighbour_'.length),
      alone = who.ms >= MOSTLY * worst.ms;
    const { count, tokens } = together(worst);
    const whose = alone ? `neighbour ${name}’s` : `${int(count)} neighbours’`;
    const size = what === 'decode' ? '' : `, ${int(alone ? who.tokens : tokens)} tokens`;
    return `${ms}: ${whose} ${what}${size}`;
  }
  if (worst.cause.startsWith('preempted_')) return `${ms}: preempted for ${name}`;
  if (worst.cause.startsWith('queue_')) return `${ms}: ${phrase(worst.cause)}, behind ${name}`;
  return `${ms}: ${phrase(worst.cause)}`;
}

const KINDS = Object.freeze([
  ['prefill', /^neighbour_prefill$/],
  ['preempted', /^(preempted_|recompute|queue_|passed_over|batch_held)/],
  ['host', /^(scheduler|unexplained)/],
]);

// What a bar looks like: 'usual', or what took more than its share of it.
export function gapKind(gap) {
  for (const [kind, pattern] of KINDS) {
    const part = gap.causes.filter(({ cause }) => pattern.test(cause));
    if (part.reduce((sum, { ms }) => sum + ms, 0) > 0.4 * gap.ms) return kind;
  }
  return 'usual';
}

export function objective(slo) {
  try {
    const { tpot_ms } = JSON.parse(slo) ?? {};
    return typeof tpot_ms === 'number' ? tpot_ms : null;
  } catch {
    return null;
  }
}

// {bars: [{from_ms, to_ms, ms, kind, over}], named: [gaps, slowest first], p50, p95, max, ceiling}
export function gapStrip({ gaps, slo }, named = 5) {
  const sorted = gaps.map(({ ms }) => ms).sort((a, b) => a - b);
  const p50 = quantile(sorted, 0.5),
    p95 = quantile(sorted, 0.95),
    max = sorted.at(-1) ?? null;
  const limit_ms = objective(slo);
  const tall = Math.max(CUT * (p50 ?? 0), 1.25 * (limit_ms ?? 0), 1e-6);
  const bars = gaps.map((gap) => ({
    from_ms: gap.at_ms - gap.ms,
    to_ms: gap.at_ms,
    ms: gap.ms,
    kind: gapKind(gap),
    over: limit_ms !== null && gap.ms > limit_ms,
  }));
  const slow = gaps.filter(({ ms }) => p50 !== null && ms > STANDS_OUT * p50);
  slow.sort((a, b) => b.ms - a.ms);
  const ceiling = Math.min(tall, max ?? tall);
  return { bars, named: slow.slice(0, named), p50, p95, max, limit_ms, ceiling };
}
