// Owns: how numbers, durations and instants read, and the words of the closed reasons. Called by:
// every view. Pure; tested without a browser. It must never guess: what is not known is a dash.

const group = new Intl.NumberFormat('en-US');
const known = (n) => n !== null && n !== undefined && !Number.isNaN(n);

export const int = (n) => (known(n) ? group.format(Math.round(n)) : '–');
export function percent(share) {
  if (!known(share)) return '–';
  return share > 0 && share < 0.005 ? '<1 %' : Math.round(share * 100) + ' %';
}
export const plural = (n, word, many = word + 's') => `${int(n)} ${n === 1 ? word : many}`;

export function duration(ms) {
  if (!known(ms)) return '–';
  const size = Math.abs(ms);
  if (size >= 6e4) return Math.floor(ms / 6e4) + ' min ' + Math.round((ms % 6e4) / 1e3) + ' s';
  if (size >= 1e4) return (ms / 1e3).toFixed(1) + ' s';
  if (size >= 1e3) return (ms / 1e3).toFixed(2) + ' s';
  return ms.toFixed(size < 10 ? 1 : 0) + ' ms';
}

// Time of day (the reader's own zone) of an instant, with 0 to 3 digits of a second.
export function timeOfDay(ns, startedUs, digits = 0) {
  const date = new Date((startedUs || 0) / 1e3 + ns / 1e6);
  const two = (n) => String(n).padStart(2, '0');
  const base = [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(':');
  return digits
    ? base + '.' + String(date.getMilliseconds()).padStart(3, '0').slice(0, digits)
    : base;
}

export const REASON = Object.freeze({
  no_waiting: 'next step',
  batch_closed: 'batch closed',
  seqs: 'rows full',
  budget: 'budget spent',
  prefill_cap: 'prefill cap',
  dependency: 'not ready',
  slo: 'would break SLO',
  kv: 'KV full',
  policy: 'quota',
  preempted_kv: 'preempted',
  preempted_policy: 'preempted (policy)',
  batch_held: 'batch held',
});

export const reason = (name) => REASON[name] ?? String(name).replaceAll('_', ' ');
