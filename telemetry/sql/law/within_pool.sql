-- title: blocks stay within the pool
-- meaning: KV blocks in use, cached or at peak are more than there are, or hold more tokens than
--   fit.
-- unit: blocks
-- chart: table
-- window: yes
SELECT run_id, generation, step, kv_blocks_used, kv_blocks_cached, kv_blocks_peak, kv_tokens,
       kv_blocks_total
FROM tile
WHERE kv_blocks_used < 0 OR kv_blocks_peak > kv_blocks_total
   OR kv_blocks_used + kv_blocks_cached > kv_blocks_total
   OR kv_tokens > kv_blocks_used * block_tokens
ORDER BY run_id, generation, step
