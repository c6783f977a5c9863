-- title: How often the scheduler regains control
-- meaning: Time from one commit to the next, median, p99 and longest, the device's part of it,
--   and the share of the wall clock in which the engine worked.
-- unit: ms
-- chart: lines
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, median(tile_ns) / 1e6 AS p50_ms,
         quantile_cont(tile_ns, 0.99) / 1e6 AS p99_ms, max(tile_ns) / 1e6 AS max_ms,
         median(device_ns) / 1e6 AS device_p50_ms, sum(tile_ns) / 1e9 AS busy_s
  FROM tile, grid GROUP BY ALL
)
SELECT at_unix_us, round(p50_ms, 3) AS p50_ms, round(p99_ms, 3) AS p99_ms,
       round(max_ms, 3) AS max_ms, round(device_p50_ms, 3) AS device_p50_ms,
       round(coalesce(busy_s, 0) / bucket_s, 4) AS busy_share
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
