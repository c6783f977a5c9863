// Owns: the SELECTs that show a whole run small: which runs there are, and one run cut into buckets
// of equal length with its losses and faults. Called by: page.js and range.js. Pure: texts, and
// rows turned into columns.

export const BUCKETS = 480;

export const RUNS = `SELECT run_id, min(started_unix_us) AS started_unix_us,
  coalesce(min(first_ns), 0) AS first_ns, max(last_ns) AS last_ns, any_value(model) AS model,
  any_value(policy) AS policy, any_value(batching) AS batching, sum(steps)::BIGINT AS steps
FROM (
  SELECT run_id, started_unix_us, model, policy, batching, NULL AS first_ns, 0 AS last_ns,
    0 AS steps
  FROM run
  UNION ALL SELECT run_id, NULL, NULL, NULL, NULL, min(begin_at_ns), max(end_at_ns), count(*)
  FROM iteration GROUP BY run_id
  UNION ALL SELECT run_id, NULL, NULL, NULL, NULL, NULL, max(released_at_ns), 0
  FROM request_end GROUP BY run_id
  UNION ALL SELECT run_id, NULL, NULL, NULL, NULL, NULL, max(fault_at_ns), 0
  FROM fault GROUP BY run_id
) GROUP BY run_id HAVING min(started_unix_us) IS NOT NULL ORDER BY 2 DESC, 1 LIMIT 200`;

export const OVERVIEW = `SELECT
  least(${BUCKETS - 1}, (end_at_ns - $2) * ${BUCKETS} // greatest(1, $3 - $2))::BIGINT AS place,
  sum(prefill_tokens)::BIGINT AS prefill, sum(decode_tokens)::BIGINT AS decode,
  max(waiting)::BIGINT AS waiting, sum(len(preempted))::BIGINT AS preempted,
  sum(lost_before)::BIGINT AS lost
FROM iteration WHERE run_id = $1 AND end_at_ns >= $2 AND end_at_ns <= $3
GROUP BY place ORDER BY place`;

// Where records were lost and where something broke: [kind, at_ns, words].
export const NOTED = `SELECT 'lost' AS kind, coalesce((
    SELECT min(begin_at_ns) FROM iteration i WHERE i.run_id = $1 AND i.seq > l.to_seq
  ), $3) AS at_ns, l.lost || ' records lost' AS words
FROM telemetry_lost l WHERE l.run_id = $1
UNION ALL SELECT 'fault', fault_at_ns, error FROM fault
WHERE run_id = $1 AND fault_at_ns BETWEEN $2 AND $3 ORDER BY at_ns LIMIT 200`;

// Columns of BUCKETS numbers from the rows of OVERVIEW; the rate is tokens a second.
export function bucketsOf({ columns, rows }, length_ns) {
  const seconds = length_ns / 1e9 / BUCKETS || 1;
  const out = {};
  columns.slice(1).forEach(({ name }, i) => {
    out[name] = new Float64Array(BUCKETS);
    for (const row of rows) out[name][row[0]] = row[i + 1] ?? 0;
  });
  out.rate = out.prefill.map((n, i) => (n + out.decode[i]) / seconds);
  return out;
}

export const most = (column) => column.reduce((a, b) => Math.max(a, b), 0);
