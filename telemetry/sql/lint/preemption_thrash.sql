-- title: Preemption thrash
-- meaning: Too much of what was computed was thrown away: the KV cache is too small for what is
--   admitted, or the policy preempts too eagerly.
-- unit: tokens
-- chart: table
-- window: yes
-- parameter: lost_share_max number 0..1 = 0.1; a healthy overload loses a few percent; from a
--   tenth on, admitting less would serve more
-- parameter: preemptions_min integer 1..1000000 = 3; one or two are no pattern
WITH work AS (
  SELECT run_id, generation, sum(len(preempted)) AS preemptions,
         sum(coalesce(list_sum(preempted_lost_tokens), 0)) AS lost_tokens,
         sum(prefill_tokens + decode_tokens) AS computed_tokens,
         mode(list_extract(preempted_causes, 1)) AS main_cause
  FROM tile GROUP BY ALL
)
SELECT run_id, generation, preemptions, main_cause, lost_tokens, computed_tokens,
       round(lost_tokens / computed_tokens, 4) AS lost_share
FROM work
WHERE preemptions >= $preemptions_min AND lost_tokens > $lost_share_max * computed_tokens
ORDER BY run_id, generation
