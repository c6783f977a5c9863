-- title: Recompute tax
-- meaning: What preemption cost: computed tokens thrown away, their share of all that was
--   computed, and what computing them again took by the step model in force.
-- unit: tokens
-- chart: table
-- window: yes
WITH work AS (
  SELECT run_id, sum(prefill_tokens + decode_tokens) AS computed_tokens,
         sum(len(preempted)) AS preemptions,
         sum(len(list_filter(preempted_causes, lambda cause: cause = 'kv'))) AS kv_preemptions,
         sum(len(list_filter(preempted_causes, lambda cause: cause = 'policy')))
           AS policy_preemptions,
         sum(coalesce(list_sum(preempted_lost_tokens), 0)) AS lost_tokens,
         sum(coalesce(list_sum(preempted_blocks), 0)) AS lost_blocks
  FROM tile GROUP BY run_id
), victims AS (
  SELECT run_id, count(*) FILTER (preemptions > 0) AS preempted_requests,
         sum(recomputed_tokens) AS recomputed_tokens
  FROM ended GROUP BY run_id
), model AS (
  SELECT run_id, arg_max(p, seq) AS prefill_token_ns FROM step_model GROUP BY run_id
), waits AS (
  SELECT c.run_id, sum(c.ns) FILTER (c.cause = 'recompute') / 1e6 AS recompute_ms,
         sum(c.ns) FILTER (c.cause LIKE 'preempted%') / 1e6 AS preempted_ms
  FROM request_cause c JOIN ended e ON e.run_id = c.run_id AND e.request = c.request
  GROUP BY c.run_id
)
SELECT run_id, preemptions, kv_preemptions, policy_preemptions,
       coalesce(preempted_requests, 0) AS preempted_requests, lost_blocks, lost_tokens,
       computed_tokens, round(lost_tokens / nullif(computed_tokens, 0), 4) AS lost_share,
       coalesce(recomputed_tokens, 0) AS recomputed_tokens,
       round(recomputed_tokens * prefill_token_ns / 1e6, 3) AS recompute_device_ms,
       round(recompute_ms, 3) AS requests_recompute_ms,
       round(preempted_ms, 3) AS requests_preempted_ms
FROM work LEFT JOIN victims USING (run_id) LEFT JOIN model USING (run_id)
LEFT JOIN waits USING (run_id)
ORDER BY run_id
