// Owns: what the verdict says of slow token gaps: one step that held everybody up, or gaps that as
// a whole are over the objective of those who run. Called by: verdict.js. Pure: records in, a
// sentence or null out. It names the step's largest part and the prompt read in it, never a guess.

import { duration, int, percent, plural } from '../format.js';
import { KIND } from '../score/kinds.js';
import { stepParts } from '../score/strips.js';

const WINDOW_NS = 2e9;
const STEPS_LEAST = 8;
const TIMES_USUAL = 3;
const FELT_NS = 40e6; // over the usual: what a reader of a stream notices
const RATE_S = 5;
const PARTS = ['the device', 'launching', 'planning', 'committing', 'the gap between two steps'];

// The slowest step with decodes of the last two seconds, and the usual one: {index, ns, usual_ns}.
export function slowest(columns) {
  const times = [];
  let worst = -1,
    worst_ns = 0;
  for (let i = columns.find(columns.newestNs - WINDOW_NS); i < columns.count; i++) {
    if (!columns.decode_tokens[columns.slot(i)]) continue;
    const ns = columns.tileNs(i);
    times.push(ns);
    if (ns > worst_ns) [worst, worst_ns] = [i, ns];
  }
  if (times.length < STEPS_LEAST) return null;
  times.sort((a, b) => a - b);
  return { index: worst, ns: worst_ns, usual_ns: times[times.length >> 1] };
}

// Who had most prompt tokens in an iteration: [request, tokens], or null.
function reader(columns, index) {
  let most = null;
  for (let k = 0; k < columns.ops(index); k++) {
    const op = columns.op(index, k),
      kind = columns.opKind[op];
    if (kind !== KIND.PREFILL && kind !== KIND.RECOMPUTE) continue;
    const tokens = columns.opAmount[op];
    if (!most || tokens > most[1]) most = [columns.opRequest[op], tokens];
  }
  return most;
}

export function slowStep(store) {
  const { columns } = store,
    found = slowest(columns);
  if (!found || found.ns < TIMES_USUAL * found.usual_ns) return null;
  if (found.ns - found.usual_ns < FELT_NS) return null;
  const s = columns.slot(found.index),
    parts = stepParts(columns, s);
  const largest = parts.indexOf(Math.max(...parts));
  const read = reader(columns, found.index);
  const tokens = read && plural(read[1], 'prompt token');
  const beside = read ? `, reading ${tokens} of ${store.name(read[0])}` : '';
  const ms = (ns) => duration(ns / 1e6);
  return {
    level: 'warn',
    head: 'A token came late',
    ns: found.ns,
    request: read?.[0],
    body:
      `step ${int(columns.step[s])} took ${ms(found.ns)} instead of ${ms(found.usual_ns)} for ` +
      `${plural(columns.decode_tokens[s], 'decode')}${beside}; ${PARTS[largest]} had ` +
      `${percent(parts[largest] / found.ns)} of it.`,
  };
}

// Gaps, or first tokens, whose 95th percentile of the last seconds is over the objective.
export function overObjective(store) {
  const { seconds, columns, slo } = store;
  if (!slo) return null;
  const to = Math.floor(columns.newestNs / 1e9);
  const p95 = (name) => seconds.quantile(name, 0.95, to - RATE_S, to);
  const late = [
    ['gap', 'Token gaps are over their SLO', slo.tpot_ms],
    ['firstToken', 'First tokens are over their SLO', slo.ttft_ms],
  ].find(([name, , bound]) => bound && (p95(name) ?? 0) > bound);
  if (!late) return null;
  const [name, head, bound] = late,
    found = slowest(columns),
    s = columns.slot(columns.last);
  const step = found ? ` A step takes ${duration(found.usual_ns / 1e6)}` : '';
  const load = step && ` with ${plural(columns.rows[s], 'request')} in it.`;
  const said = `p95 ${duration(p95(name))} in the last ${RATE_S} s, allowed ${duration(bound)}.`;
  return { level: 'bad', head, body: said + step + load };
}
