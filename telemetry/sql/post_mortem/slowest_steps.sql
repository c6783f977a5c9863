-- title: Slowest steps
-- meaning: The steps that took longest, with their batch, and what the step model expected of
--   them.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: steps integer 1..1000 = 20; how many steps to show
WITH slowest AS (
  SELECT * FROM tile ORDER BY tile_ns DESC, seq LIMIT $steps
), fitted AS (
  SELECT t.run_id, t.seq, arg_max(m.fixed, m.seq) AS fixed, arg_max(m.p, m.seq) AS p,
         arg_max(m.d, m.seq) AS d, arg_max(m.c, m.seq) AS c
  FROM slowest t JOIN step_model m
    ON m.run_id = t.run_id AND m.generation = t.generation AND m.seq < t.seq
  GROUP BY ALL
)
SELECT t.at_unix_us, t.generation, t.step, round(tile_ns / 1e6, 3) AS step_ms,
       round(device_ns / 1e6, 3) AS device_ms,
       round((fixed + p * prefill_tokens + d * (decode_tokens + padding_tokens + idle_rows)
         + c * coalesce(list_sum(start_positions) + list_sum(token_counts), 0)) / 1e6, 3)
         AS expected_device_ms,
       round(plan_ns / 1e6, 3) AS plan_ms, round(gap_ns / 1e6, 3) AS gap_ms,
       len(requests) AS batch_rows, prefill_tokens, decode_tokens, len(preempted) AS preempted,
       waiting, admission_stop
FROM slowest t LEFT JOIN fitted USING (run_id, seq)
ORDER BY tile_ns DESC, t.seq
