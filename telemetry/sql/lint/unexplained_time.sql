-- title: Unexplained time
-- meaning: A request that did not fail has time that no cause accounts for: the record of its span
--   has a hole, or the explanation a fault.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: share_max number 0..1 = 0.02; rounding and clocks stay far below a fiftieth
-- parameter: ms_min number 0..1000000 = 5; the sum is promised within 5 ms of the client's clock
WITH holes AS (
  SELECT c.run_id, c.request, sum(c.ns) / 1e6 AS unexplained_ms
  FROM request_cause c WHERE c.cause = 'unexplained' AND c.ns > 0 GROUP BY ALL
)
SELECT e.run_id, e.request_id, e.tenant, e.at_unix_us AS ended_at_unix_us,
       round(unexplained_ms, 3) AS unexplained_ms, round(e2e_ms, 3) AS e2e_ms,
       round(unexplained_ms / nullif(e2e_ms, 0), 4) AS share
FROM holes h JOIN ended e ON e.run_id = h.run_id AND e.request = h.request
WHERE e.finish <> 'error' AND unexplained_ms >= $ms_min AND unexplained_ms > $share_max * e2e_ms
ORDER BY unexplained_ms DESC, e.run_id, e.request_id
