-- title: Latency over time
-- meaning: Time to first byte, time per output token and end to end, each median and p99, of the
--   requests that ended in each bucket; end to end counts those that were served.
-- unit: ms
-- chart: lines
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, count(*) AS ended,
         median(ttft_ms) AS ttft_p50_ms, quantile_cont(ttft_ms, 0.9) AS ttft_p90_ms,
         quantile_cont(ttft_ms, 0.99) AS ttft_p99_ms,
         median(tpot_ms) AS tpot_p50_ms, quantile_cont(tpot_ms, 0.99) AS tpot_p99_ms,
         median(e2e_ms) FILTER (served) AS e2e_p50_ms,
         quantile_cont(e2e_ms, 0.99) FILTER (served) AS e2e_p99_ms
  FROM ended, grid GROUP BY ALL
)
SELECT at_unix_us, round(ttft_p50_ms, 3) AS ttft_p50_ms, round(ttft_p90_ms, 3) AS ttft_p90_ms,
       round(ttft_p99_ms, 3) AS ttft_p99_ms, round(tpot_p50_ms, 3) AS tpot_p50_ms,
       round(tpot_p99_ms, 3) AS tpot_p99_ms, round(e2e_p50_ms, 3) AS e2e_p50_ms,
       round(e2e_p99_ms, 3) AS e2e_p99_ms, coalesce(ended, 0) AS ended
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
