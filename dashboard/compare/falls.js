// Owns: a comparison's waterfall: from a mean request of A, by what each cause adds or takes, to
// one of B. Called by: compare/page.js. Pure: the body of POST /telemetry/diff in, bars out. Bars
// adjoin, so what is on screen sums to the whole; changes too small to see are one bar.

const SMALL = 0.004; // of the longer of the two requests

// [{name, kind: total|less|more|rest, from_ms, to_ms, delta_ms, verdict, within}]
export function falls({ request, workload, causes }) {
  const largest = Math.max(request.a, request.b) || 1;
  const steps = [...causes, { ...workload, name: 'other lengths' }].map((change) => ({
    ...change,
    delta: change.b - change.a,
  }));
  const seen = ({ delta, verdict }) =>
    Math.abs(delta) >= SMALL * largest || verdict === 'better' || verdict === 'worse';
  const shown = steps.filter(seen);
  const rest = steps.filter((step) => !seen(step) && Number.isFinite(step.delta));
  let at = request.a;
  const rows = [total('A', request.a)];
  for (const { name, delta, verdict, low, high } of shown) {
    if (!Number.isFinite(delta)) continue;
    const kind = delta < 0 ? 'less' : 'more';
    rows.push({ name, kind, from_ms: at, to_ms: at + delta, delta_ms: delta, verdict, low, high });
    at += delta;
  }
  const delta = rest.reduce((sum, step) => sum + step.delta, 0);
  if (rest.length) {
    rows.push({
      name: `${rest.length} smaller`,
      kind: 'rest',
      from_ms: at,
      to_ms: at + delta,
      delta_ms: delta,
      verdict: 'same',
      low: null,
      high: null,
    });
  }
  rows.push(total('B', request.b));
  return rows;
}

function total(name, ms) {
  const row = { from_ms: 0, to_ms: ms, delta_ms: ms, verdict: 'same', low: null, high: null };
  return { name, kind: 'total', ...row };
}

// The scale that all bars share: from 0, or from near the lowest bar where all changes are small
// beside the whole, so that they can be seen; totals are then cut, and say so.
export function scaleOf(rows) {
  const edges = rows.flatMap(({ from_ms, to_ms, kind }) =>
    kind === 'total' ? [to_ms] : [from_ms, to_ms],
  );
  const low = Math.min(...edges),
    high = Math.max(...edges);
  const cut = high > 0 && high - low < 0.25 * high;
  const from = cut ? Math.max(0, low - (high - low) * 0.6) : 0;
  return { from_ms: from, to_ms: high || 1, cut: from > 0 };
}
