-- title: Gaps between tokens over time
-- meaning: Inter-token latency in the engine: time between the commits of a request's tokens, by
--   the later one; a step gives a token when it reaches past everything computed before.
-- unit: ms
-- chart: lines
-- window: points
WITH reached AS (
  SELECT t.run_id, t.request, t.seq, t.end_at_ns, t.at_unix_us,
         t.start_position + t.token_count AS reach, s.prompt_tokens,
         max(t.start_position + t.token_count) OVER (
           PARTITION BY t.run_id, t.request ORDER BY t.seq
           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM tile_slice t
  JOIN request_start s ON s.run_id = t.run_id AND s.request = t.request
), gap AS (
  SELECT at_unix_us, (end_at_ns - lag(end_at_ns) OVER (
           PARTITION BY run_id, request ORDER BY seq)) / 1e6 AS gap_ms
  FROM reached WHERE reach >= prompt_tokens AND (before IS NULL OR reach > before)
), counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, count(gap_ms) AS gaps,
         median(gap_ms) AS p50_ms, quantile_cont(gap_ms, 0.9) AS p90_ms,
         quantile_cont(gap_ms, 0.99) AS p99_ms, max(gap_ms) AS max_ms
  FROM gap, grid GROUP BY ALL
)
SELECT at_unix_us, round(p50_ms, 3) AS p50_ms, round(p90_ms, 3) AS p90_ms,
       round(p99_ms, 3) AS p99_ms, round(max_ms, 3) AS max_ms, coalesce(gaps, 0) AS gaps
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
