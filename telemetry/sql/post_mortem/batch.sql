-- title: Batch over time
-- meaning: Rows in the batch, sequences running and waiting, averaged over the steps of each
--   bucket, and the share of the token budget that was used.
-- unit: sequences
-- chart: lines
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, avg(len(requests)) AS batch_rows,
         avg(running) AS running, avg(waiting) AS waiting, max(waiting) AS waiting_max,
         sum(prefill_tokens + decode_tokens) / nullif(sum(token_budget), 0) AS budget_share
  FROM tile, grid GROUP BY ALL
)
SELECT at_unix_us, round(coalesce(batch_rows, 0), 3) AS batch_rows,
       round(coalesce(running, 0), 3) AS running, round(coalesce(waiting, 0), 3) AS waiting,
       coalesce(waiting_max, 0) AS waiting_max, round(budget_share, 4) AS budget_share
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
