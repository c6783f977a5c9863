-- title: Longest gaps between tokens
-- meaning: Where streams stuttered most: the request, the step that ended the gap, and what that
--   step was busy with; steps without it in between mean preemption or being passed over.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: gaps integer 1..1000 = 20; how many gaps to show
WITH reached AS (
  SELECT t.run_id, t.request, t.seq, t.step, t.end_at_ns,
         t.start_position + t.token_count AS reach, s.prompt_tokens,
         max(t.start_position + t.token_count) OVER (
           PARTITION BY t.run_id, t.request ORDER BY t.seq
           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM tile_slice t
  JOIN request_start s ON s.run_id = t.run_id AND s.request = t.request
), gap AS (
  SELECT run_id, request, seq, end_at_ns - lag(end_at_ns) OVER token AS stall_ns,
         step - lag(step) OVER token - 1 AS steps_between
  FROM reached WHERE reach >= prompt_tokens AND (before IS NULL OR reach > before)
  WINDOW token AS (PARTITION BY run_id, request ORDER BY seq)
), longest AS (
  SELECT * FROM gap WHERE stall_ns IS NOT NULL ORDER BY stall_ns DESC, seq LIMIT $gaps
)
SELECT s.request_id, i.at_unix_us, round(stall_ns / 1e6, 3) AS gap_ms, steps_between, i.step,
       round(i.tile_ns / 1e6, 3) AS step_ms, len(i.requests) AS batch_rows, i.prefill_tokens,
       i.decode_tokens, i.waiting
FROM longest l JOIN tile i USING (run_id, seq)
JOIN request_start s ON s.run_id = l.run_id AND s.request = l.request
ORDER BY stall_ns DESC, l.seq, l.request
