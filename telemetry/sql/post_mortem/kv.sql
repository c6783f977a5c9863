-- title: KV cache over time
-- meaning: Blocks that sequences held, the peak within steps, free blocks with reusable content,
--   and how full the held blocks were with tokens.
-- unit: blocks
-- chart: lines
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, avg(kv_blocks_used) AS used,
         max(kv_blocks_peak) AS peak, avg(kv_blocks_cached) AS cached,
         max(kv_blocks_total) AS total,
         sum(kv_tokens) / nullif(sum(kv_blocks_used * block_tokens), 0) AS fill_share,
         sum(allocation_failures) AS failures
  FROM tile, grid GROUP BY ALL
)
SELECT at_unix_us, round(used, 3) AS used_blocks, peak AS peak_blocks,
       round(cached, 3) AS cached_blocks, total AS total_blocks,
       round(fill_share, 4) AS fill_share, coalesce(failures, 0) AS allocation_failures
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
