-- title: Step time split
-- meaning: Where an average step spends its wall time: planning, launching, waiting for the
--   device, committing, and the gap between steps.
-- unit: ms
-- chart: stacked
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, avg(plan_ns) / 1e6 AS plan_ms,
         avg(launch_ns) / 1e6 AS launch_ms, avg(wait_ns) / 1e6 AS wait_ms,
         avg(commit_ns) / 1e6 AS commit_ms, avg(gap_ns) / 1e6 AS gap_ms
  FROM tile, grid GROUP BY ALL
)
SELECT at_unix_us, round(coalesce(plan_ms, 0), 6) AS plan_ms,
       round(coalesce(launch_ms, 0), 6) AS launch_ms, round(coalesce(wait_ms, 0), 6) AS wait_ms,
       round(coalesce(commit_ms, 0), 6) AS commit_ms, round(coalesce(gap_ms, 0), 6) AS gap_ms
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
