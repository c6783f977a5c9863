// Owns: the model of the waterfall: each cause a bar that begins where the last one ended, with who
// stood behind it. Called by: parts.js. Pure. It must never drop time: what is too short for a bar
// of its own is summed in one last bar, so that the bars always reach the whole.

const LEAST_SHARE = 0.0015;
const NAMED = 2;

// [{cause, ms, left, share, who: [{request_id, tokens, ms}], more}] in the record's own order.
// The last of them may be {cause: null, count}: everything too short to be seen.
export function falls({ causes, e2e_ms }) {
  const whole = Math.max(e2e_ms, 1e-9);
  const tall = causes.filter(({ ms }) => ms / whole >= LEAST_SHARE);
  const short = causes.filter(({ ms }) => ms / whole < LEAST_SHARE);
  let at = 0;
  const bar = (cause, ms, facts) => {
    const left = at / whole;
    at += ms;
    return { cause, ms, left, share: ms / whole, ...facts };
  };
  const rows = tall.map(({ cause, ms, requests = [], more }) => {
    const who = requests.slice(0, NAMED);
    const others = requests.length - who.length + (more?.requests ?? 0);
    return bar(cause, ms, { who, others });
  });
  const rest_ms = short.reduce((sum, { ms }) => sum + ms, 0);
  if (short.length) rows.push(bar(null, rest_ms, { who: [], others: 0, count: short.length }));
  return rows;
}

// The neighbours that cost it most, over all causes of the kind: [{request_id, tokens, ms}].
export function neighbours({ causes, request_id }, most) {
  const found = new Map();
  for (const { cause, requests = [] } of causes) {
    if (!/^(neighbour_|preempted_|queue_)/.test(cause)) continue;
    for (const one of requests) {
      if (one.request_id === request_id) continue;
      const known = found.get(one.request_id) ?? { request_id: one.request_id, tokens: 0, ms: 0 };
      known.tokens += one.tokens;
      known.ms += one.ms;
      found.set(one.request_id, known);
    }
  }
  return [...found.values()].sort((a, b) => b.ms - a.ms).slice(0, most);
}
