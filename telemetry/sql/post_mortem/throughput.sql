-- title: Throughput over time
-- meaning: Prompt and output tokens computed, steps taken and requests ended, each a second.
-- unit: tokens/s
-- chart: lines
-- window: points
WITH work AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, count(*) AS steps,
         sum(prefill_tokens) AS prefill, sum(decode_tokens) AS decode
  FROM tile, grid GROUP BY ALL
), departed AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, count(*) AS ended
  FROM ended, grid GROUP BY ALL
)
SELECT at_unix_us, round(coalesce(prefill, 0) / bucket_s, 3) AS prefill_tokens_per_s,
       round(coalesce(decode, 0) / bucket_s, 3) AS decode_tokens_per_s,
       round(coalesce(steps, 0) / bucket_s, 3) AS steps_per_s,
       round(coalesce(ended, 0) / bucket_s, 4) AS requests_per_s
FROM bucket LEFT JOIN work USING (bucket) LEFT JOIN departed USING (bucket) ORDER BY at_unix_us
