-- title: Who held the KV cache
-- meaning: KV blocks held times time by request, over the steps it had tokens in; share is of all
--   blocks that the pool had in that time.
-- unit: block seconds
-- chart: bars
-- window: yes
-- parameter: requests integer 1..1000 = 20; how many requests to show
WITH pool AS (
  SELECT sum(kv_blocks_total * (tile_ns / 1e9)) AS block_s FROM tile
), held AS (
  SELECT run_id, request, sum(kv_block_count * (tile_ns / 1e9)) AS block_s,
         max(kv_block_count) AS blocks_max, count(*) AS steps, sum(token_count) AS computed_tokens
  FROM tile_slice GROUP BY ALL
), most AS (
  SELECT * FROM held ORDER BY block_s DESC, request LIMIT $requests
)
SELECT coalesce(s.request_id, e.request_id) AS request_id, round(most.block_s, 6) AS block_s,
       round(most.block_s / nullif(pool.block_s, 0), 4) AS share, blocks_max, steps,
       computed_tokens, coalesce(s.tenant, e.tenant) AS tenant,
       coalesce(s.prompt_tokens, e.prompt_tokens) AS prompt_tokens, e.output_tokens, e.finish
FROM most CROSS JOIN pool
LEFT JOIN request_start s ON s.run_id = most.run_id AND s.request = most.request
LEFT JOIN request_end e ON e.run_id = most.run_id AND e.request = most.request
ORDER BY most.block_s DESC, most.request
