// Owns: the way from rows of SQL back to records in the order in which they were published, as the
// stream sends them, so that a Store folds the past as it folds the present. Called by: load.js.
// Pure: it makes the SELECTs of a window and merges their answers, and asks nobody.

export const PAGE_ROWS = 2000;

// Which rows of run $1 a picture from $2 to $3 ns needs; those before it say what stood then.
const LIVED = `request IN (SELECT request FROM request_start WHERE run_id = $1
  AND arrived_at_ns <= $3 AND request NOT IN
  (SELECT request FROM request_end WHERE run_id = $1 AND released_at_ns < $2))`;
const STEPS = 'FROM iteration WHERE run_id = $1 AND end_at_ns > $2 AND begin_at_ns < $3';
const SHOWN = Object.freeze({
  run: '$2::BIGINT IS NOT NULL AND $3::BIGINT IS NOT NULL',
  request_start: LIVED,
  iteration: 'end_at_ns > $2 AND begin_at_ns < $3',
  request_end: 'released_at_ns >= $2 AND decided_at_ns <= $3',
  fault: 'fault_at_ns BETWEEN $2 AND $3',
  rejection: 'rejected_at_ns BETWEEN $2 AND $3',
});
export const SHOWN_KINDS = Object.freeze(Object.keys(SHOWN));

export function pageOf(kind) {
  return `SELECT * EXCLUDE (run_id) FROM ${kind} WHERE run_id = $1 AND seq > $4 AND ${SHOWN[kind]}
ORDER BY seq LIMIT ${PAGE_ROWS}`;
}

export const LOST = `SELECT from_seq, to_seq, lost FROM telemetry_lost WHERE run_id = $1
  AND to_seq >= (SELECT coalesce(min(seq), 0) ${STEPS})
  AND from_seq <= (SELECT coalesce(max(seq), -1) ${STEPS}) ORDER BY from_seq`;

// What those who lived when the window ($2) began had been through before it: how far each was ever
// computed, how often it was preempted, and why it still stood preempted then (null: it did not).
export const BEFORE = `WITH earlier AS (
  SELECT seq, preempted, preempted_lost_tokens, preempted_causes, admitted FROM iteration
  WHERE run_id = $1 AND end_at_ns <= $2 AND end_at_ns >= (SELECT min(arrived_at_ns)
    FROM request_start WHERE run_id = $1 AND arrived_at_ns <= $2 AND request NOT IN
    (SELECT request FROM request_end WHERE run_id = $1 AND released_at_ns < $2))
), lost AS (
  SELECT seq, unnest(preempted) AS request, unnest(preempted_lost_tokens) AS tokens,
         unnest(preempted_causes) AS cause FROM earlier WHERE len(preempted) > 0
), back AS (
  SELECT request, max(seq) AS seq FROM (SELECT seq, unnest(admitted) AS request FROM earlier
    WHERE len(admitted) > 0) GROUP BY request
)
SELECT l.request, max(l.tokens)::BIGINT AS computed, count(*) AS preemptions,
       CASE WHEN max(l.seq) > coalesce(any_value(b.seq), -1) THEN arg_max(l.cause, l.seq) END
         AS cause
FROM lost l LEFT JOIN back b USING (request) GROUP BY l.request`;

export const COUNTS = `SELECT count(*) AS iterations, coalesce(sum(len(requests)), 0)::BIGINT
  AS slices ${STEPS}`;

// One page: its records with their place, and whether there is more behind it.
export function readPage({ columns, rows, truncated }) {
  const names = columns.map((column) => column.name);
  const seq = names.indexOf('seq'),
    generation = names.indexOf('generation');
  const placed = rows.map((row) => {
    const record = {};
    for (let i = 0; i < names.length; i++) {
      if (i !== seq && i !== generation) record[names[i]] = row[i];
    }
    return { seq: row[seq], record };
  });
  const more = rows.length > 0 && (truncated || rows.length === PAGE_ROWS);
  return { placed, more, after: more ? placed[placed.length - 1].seq : null };
}

// What a Store is fed: a hello with what lived when the window began, then every record of it in
// its place, losses too. parts: {kind: [{seq, record}]}; lost: [[from, to, count]]; earlier: the
// rows of BEFORE as objects.
export function replay(parts, lost, from_ns, earlier = []) {
  const first = parts.iteration[0]?.seq ?? Infinity;
  const runs = parts.run.filter(({ seq }) => seq < first);
  const before = (parts.request_start ?? []).filter(({ seq }) => seq < first);
  const run = (runs[runs.length - 1] ?? parts.run[0])?.record ?? null;
  const placed = [];
  for (const kind of SHOWN_KINDS) {
    for (const { seq, record } of parts[kind] ?? []) {
      if (seq < first && (kind === 'run' || kind === 'request_start')) continue;
      if (kind === 'run' && record === run) continue;
      // An end comes after its request's last step, which may lie before the window.
      if (seq < first && kind === 'request_end' && record.released_at_ns < from_ns) continue;
      placed.push({ seq, kind, record });
    }
  }
  for (const [from, to, count] of lost) {
    placed.push({ seq: to, kind: 'lost', record: { from, to, count, by_kind: null } });
  }
  placed.sort((a, b) => a.seq - b.seq);
  const live = before.map(({ record }) => record);
  const hello = { schema_version: run?.schema_version ?? 0, run, live, lost: 0, earlier };
  return [{ seq: first - 1, kind: 'hello', record: hello }, ...placed];
}
