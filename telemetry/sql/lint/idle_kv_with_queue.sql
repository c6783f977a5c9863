-- title: Idle KV with a queue
-- meaning: Requests waited while most of the KV cache was free: another limit (running sequences,
--   token budget, prefill cap, a quota) is set too low for this cache.
-- unit: s
-- chart: table
-- window: yes
-- parameter: free_share_min number 0..1 = 0.5; with half of the cache free another request would
--   fit
-- parameter: time_share_max number 0..1 = 0.2; a burst may queue for a moment, a fifth of the
--   busy time is a setting
-- parameter: queue_s_min number 0..1000000 = 1; shorter queues are not worth a change
WITH held AS (
  SELECT run_id, generation, admission_stop AS reason, sum(tile_ns) / 1e9 AS queue_s,
         sum(waiting * tile_ns) / sum(tile_ns) AS waiting_mean,
         1 - sum(kv_blocks_peak / kv_blocks_total * tile_ns) / sum(tile_ns) AS free_share,
         max(running) AS running_max, any_value(seqs_max) AS seqs_max
  FROM tile
  WHERE waiting > 0 AND admission_stop IN ('seqs', 'budget', 'prefill_cap', 'policy', 'slo')
    AND kv_blocks_peak <= (1 - $free_share_min) * kv_blocks_total
  GROUP BY ALL
), busy AS (
  SELECT run_id, generation, sum(tile_ns) / 1e9 AS busy_s FROM tile GROUP BY ALL
)
SELECT run_id, generation, reason, round(queue_s, 3) AS queue_s,
       round(queue_s / busy_s, 4) AS share_of_busy_time, round(waiting_mean, 2) AS waiting_mean,
       round(free_share, 4) AS free_share, running_max, seqs_max
FROM held JOIN busy USING (run_id, generation)
WHERE queue_s >= $queue_s_min AND queue_s > $time_share_max * busy_s
ORDER BY run_id, generation, queue_s DESC
