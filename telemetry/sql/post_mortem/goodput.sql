-- title: Goodput under an objective
-- meaning: Requests and output tokens a second that were served within the objective, received to
--   first byte and per token after it; the rest by what they missed.
-- unit: requests/s
-- chart: lines
-- window: points
-- parameter: ttft_ms number 0..3600000 = 1000; the longest good time to first byte, ms
-- parameter: tpot_ms number 0..3600000 = 100; the longest good time per output token, ms
WITH judged AS (
  SELECT at_unix_us, output_tokens, served AND ttft_ms IS NOT NULL AS served,
         ttft_ms > $ttft_ms AS late, coalesce(tpot_ms > $tpot_ms, false) AS slow
  FROM ended
), counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, count(*) AS ended,
         count(*) FILTER (served AND NOT late AND NOT slow) AS good,
         sum(output_tokens) FILTER (served AND NOT late AND NOT slow) AS good_tokens,
         count(*) FILTER (NOT served) AS unserved,
         count(*) FILTER (served AND late) AS missed_ttft,
         count(*) FILTER (served AND slow) AS missed_tpot
  FROM judged, grid GROUP BY ALL
)
SELECT at_unix_us, round(coalesce(good, 0) / bucket_s, 4) AS good_per_s,
       round(coalesce(ended, 0) / bucket_s, 4) AS ended_per_s,
       round(coalesce(good_tokens, 0) / bucket_s, 3) AS good_tokens_per_s,
       round(good / ended, 4) AS good_share, coalesce(missed_ttft, 0) AS missed_ttft,
       coalesce(missed_tpot, 0) AS missed_tpot, coalesce(unserved, 0) AS unserved
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
