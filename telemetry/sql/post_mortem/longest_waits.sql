-- title: Longest waits, and behind whom
-- meaning: The requests that waited longest for their first admission, split by the check that
--   held the queue, with the request that stood at its head most of that time.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: requests integer 1..1000 = 10; how many requests to show
WITH longest AS (
  SELECT run_id, request, request_id, tenant, at_unix_us, waited_ms, arrived_at_ns,
         coalesce(admitted_at_ns, first_scheduled_at_ns, decided_at_ns) AS until_ns
  FROM ended ORDER BY waited_ms DESC, at_unix_us LIMIT $requests
), part AS (
  SELECT l.run_id, l.request, i.admission_stop AS reason, i.admission_blocker AS head,
         count(*) AS steps,
         sum(least(i.end_at_ns, l.until_ns) - greatest(i.begin_at_ns, l.arrived_at_ns)) AS ns
  FROM longest l
  JOIN iteration i ON i.run_id = l.run_id
    AND i.end_at_ns > l.arrived_at_ns AND i.begin_at_ns < l.until_ns
  WHERE i.end_at_ns > (SELECT min(arrived_at_ns) FROM longest)
  GROUP BY ALL
), reasons AS (
  SELECT run_id, request, reason, sum(steps) AS steps, sum(ns) / 1e6 AS reason_ms,
         arg_max(head, ns) FILTER (head <> request) AS behind,
         max(ns) FILTER (head <> request) / 1e6 AS behind_ms
  FROM part GROUP BY ALL
)
SELECT l.request_id, l.tenant, l.at_unix_us AS ended_at_unix_us, round(waited_ms, 3) AS waited_ms,
       reason, round(reason_ms, 3) AS reason_ms, steps, s.request_id AS behind,
       round(behind_ms, 3) AS behind_ms
FROM longest l LEFT JOIN reasons USING (run_id, request)
LEFT JOIN request_start s ON s.run_id = l.run_id AND s.request = reasons.behind
ORDER BY waited_ms DESC, ended_at_unix_us, l.request, reason_ms DESC
