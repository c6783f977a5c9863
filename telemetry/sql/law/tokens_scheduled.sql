-- title: computed + lost - cached + dropped = scheduled
-- meaning: The tokens that steps computed for a request are not those that it ended with, plus
--   what preemption lost and late results dropped, less what the cache gave; checked where no
--   iteration of its life is missing.
-- unit: tokens
-- chart: table
-- window: yes
WITH checked AS (
  SELECT e.run_id, e.request, e.request_id, e.finish, e.arrived_at_ns, e.released_at_ns, e.seq,
         s.seq AS start_seq, e.prompt_tokens + e.output_tokens - 1 AS known, e.dropped_tokens
  FROM ended e JOIN request_start s ON s.run_id = e.run_id AND s.request = e.request
  WHERE e.served AND e.cancel_requested_at_ns IS NULL AND e.first_token_at_ns IS NOT NULL
), since AS NOT MATERIALIZED (
  SELECT i.run_id, i.seq, i.end_at_ns, i.lost_before, i.requests, i.token_counts, i.preempted,
         i.preempted_lost_tokens, i.admitted, i.admitted_cached_tokens
  FROM iteration i JOIN span w ON w.run_id = i.run_id AND i.end_at_ns < w.end_ns
  WHERE i.end_at_ns >= (SELECT coalesce(min(arrived_at_ns), 9223372036854775807) FROM checked)
), moved AS (
  SELECT run_id, unnest(requests) AS request, unnest(token_counts) AS tokens, 0 AS lost,
         0 AS cached, 0 AS came, 0 AS went
  FROM since
  UNION ALL
  SELECT run_id, unnest(preempted), 0, unnest(preempted_lost_tokens), 0, 0, 1 FROM since
  UNION ALL
  SELECT run_id, unnest(admitted), 0, 0, unnest(admitted_cached_tokens), 1, 0 FROM since
), sums AS (
  -- Whoever went as often as it came ended while preempted, by a token that was in flight then:
  -- nothing of it is computed any more.
  SELECT run_id, request, sum(tokens) AS scheduled, sum(lost) AS lost, sum(cached) AS cached,
         sum(came) > sum(went) AS holds
  FROM moved GROUP BY ALL
), hole AS (
  SELECT run_id, end_at_ns AS at_ns, seq FROM since WHERE lost_before > 0
), compared AS (
  SELECT c.*, CASE WHEN coalesce(holds, true) THEN known ELSE 0 END AS computed,
         coalesce(scheduled, 0) AS scheduled, coalesce(lost, 0) AS lost,
         coalesce(cached, 0) AS cached
  FROM checked c LEFT JOIN sums USING (run_id, request)
)
SELECT run_id, request, request_id, finish, scheduled, computed, lost, cached, dropped_tokens
FROM compared b
WHERE scheduled <> computed + lost - cached + dropped_tokens
  AND NOT EXISTS (
    FROM hole h WHERE h.run_id = b.run_id AND h.at_ns >= b.arrived_at_ns AND h.seq <= b.seq)
  AND NOT EXISTS (
    FROM telemetry_lost l WHERE l.run_id = b.run_id AND l.to_seq >= b.start_seq
      AND l.from_seq <= b.seq)
ORDER BY run_id, request
