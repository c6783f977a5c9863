-- title: Operating point and knee
-- meaning: Decode-only steps by batch size B: the step time T(B), tokens a second B/T(B), and the
--   knee, the smallest B that reaches most of the best rate; beyond it latency buys little.
-- unit: tokens/s
-- chart: scatter
-- window: yes
-- parameter: knee_share number 0.1..1 = 0.9; share of the best rate that counts as most of it
-- parameter: steps_min integer 1..1000000 = 5; sizes with fewer steps are too uncertain to show
WITH size AS (
  SELECT len(requests) AS batch_rows, count(*) AS steps, median(tile_ns) / 1e6 AS step_ms,
         median(device_ns) / 1e6 AS device_ms, sum(tile_ns) / 1e9 AS seconds
  FROM tile WHERE prefill_tokens = 0 AND len(requests) > 0
  GROUP BY ALL HAVING steps >= $steps_min
), rated AS (
  SELECT *, batch_rows * 1000 / nullif(step_ms, 0) AS tokens_per_s FROM size
), best AS (
  SELECT max(tokens_per_s) AS best FROM rated
), knee AS (
  SELECT min(batch_rows) AS knee FROM rated, best WHERE tokens_per_s >= $knee_share * best
)
SELECT batch_rows, round(tokens_per_s, 3) AS tokens_per_s, round(step_ms, 6) AS step_ms,
       round(device_ms, 6) AS device_ms, steps,
       round(seconds / nullif(sum(seconds) OVER (), 0), 4) AS share_of_time,
       batch_rows = knee AS is_knee
FROM rated, knee ORDER BY batch_rows
