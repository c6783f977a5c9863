-- title: Padding waste
-- meaning: Too many rows that the device computed were padding to a bucket, or rows that a fixed
--   batch kept after their end: the buckets are too coarse, or the batching mode does not fit.
-- unit: rows
-- chart: table
-- window: yes
-- parameter: waste_share_max number 0..1 = 0.25; buckets that double cost up to a half and a
--   quarter on average: more than that is avoidable
-- parameter: steps_min integer 1..1000000 = 20; fewer steps say nothing
WITH work AS (
  SELECT run_id, generation, count(*) AS steps, sum(padding_tokens) AS padding_tokens,
         sum(idle_rows) AS idle_rows, sum(prefill_tokens + decode_tokens) AS useful_tokens
  FROM tile WHERE len(requests) > 0 GROUP BY ALL
)
SELECT run_id, generation, steps, padding_tokens, idle_rows, useful_tokens,
       round((padding_tokens + idle_rows) / (padding_tokens + idle_rows + useful_tokens), 4)
         AS waste_share
FROM work
WHERE steps >= $steps_min AND padding_tokens + idle_rows
    > $waste_share_max * (padding_tokens + idle_rows + useful_tokens)
ORDER BY run_id, generation
