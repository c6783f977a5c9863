-- title: each end has its start
-- meaning: A request ended that never started, on a record that reaches back to its arrival.
-- unit: requests
-- chart: table
-- window: yes
WITH orphan AS (
  SELECT e.run_id, e.request, e.request_id, e.arrived_at_ns, e.finish, e.at_unix_us
  FROM ended e ANTI JOIN request_start s ON s.run_id = e.run_id AND s.request = e.request
), kept AS (
  -- Retention may have taken the oldest part: what arrived before the oldest step left cannot tell.
  SELECT run_id, min(seq) FILTER (step = 1 AND generation = 1) IS NOT NULL AS is_whole,
         min(begin_at_ns) AS from_ns
  FROM iteration WHERE run_id IN (SELECT run_id FROM orphan) GROUP BY run_id
)
SELECT run_id, request, request_id, finish, at_unix_us AS ended_at_unix_us
FROM orphan LEFT JOIN kept USING (run_id)
WHERE coalesce(is_whole OR arrived_at_ns > from_ns, true)
  AND NOT EXISTS (FROM telemetry_lost l WHERE l.run_id = orphan.run_id)
ORDER BY run_id, request
