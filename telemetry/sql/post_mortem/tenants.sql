-- title: Tenants
-- meaning: What each tenant asked for, got and cost: requests, tokens, waiting, latency, and its
--   share of device time and of the KV cache.
-- unit: requests
-- chart: bars
-- window: yes
WITH share AS (
  SELECT e.tenant, sum(s.device_ns) AS device_ns, sum(s.kv_block_ns) AS kv_block_ns
  FROM request_share s JOIN ended e ON e.run_id = s.run_id AND e.request = s.request
  GROUP BY e.tenant
), asked AS (
  SELECT tenant, count(*) AS requests, count(*) FILTER (served) AS served,
         count(*) FILTER (finish = 'cancelled') AS cancelled,
         count(*) FILTER (finish = 'error') AS errors, sum(prompt_tokens) AS prompt_tokens,
         sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens,
         sum(recomputed_tokens) AS recomputed_tokens, sum(preemptions) AS preemptions,
         avg(waited_ms) AS waited_ms, median(ttft_ms) AS ttft_p50_ms,
         quantile_cont(ttft_ms, 0.99) AS ttft_p99_ms
  FROM ended GROUP BY tenant
), refused AS (
  SELECT tenant, count(*) AS rejected
  FROM rejection r JOIN span s ON s.run_id = r.run_id AND rejected_at_ns >= s.begin_ns
    AND rejected_at_ns < s.end_ns
  GROUP BY tenant
)
SELECT tenant, coalesce(requests, 0) AS requests, coalesce(served, 0) AS served,
       coalesce(cancelled, 0) AS cancelled, coalesce(errors, 0) AS errors,
       coalesce(rejected, 0) AS rejected, prompt_tokens, cached_tokens, output_tokens,
       recomputed_tokens, preemptions, round(waited_ms, 3) AS waited_mean_ms,
       round(ttft_p50_ms, 3) AS ttft_p50_ms, round(ttft_p99_ms, 3) AS ttft_p99_ms,
       round(device_ns / nullif(sum(device_ns) OVER (), 0), 4) AS device_share,
       round(kv_block_ns / nullif(sum(kv_block_ns) OVER (), 0), 4) AS kv_share
FROM asked FULL JOIN refused USING (tenant) LEFT JOIN share USING (tenant)
ORDER BY requests DESC, tenant
