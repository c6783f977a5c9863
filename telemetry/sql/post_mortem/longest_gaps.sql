-- title: Longest gaps between tokens
-- meaning: Where streams stuttered most: the request, the step that ended the gap, and what that
--   step was busy with; steps without it in between mean preemption or being passed over.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: gaps integer 1..1000 = 20; how many gaps to show
WITH reached AS (
  SELECT t.run_id, t.generation, t.request, t.seq, t.step, t.end_at_ns, t.at_unix_us,
         t.start_position + t.token_count AS reach, s.prompt_tokens, s.request_id,
         max(t.start_position + t.token_count) OVER (
           PARTITION BY t.run_id, t.request ORDER BY t.seq
           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM tile_slice t
  JOIN request_start s ON s.run_id = t.run_id AND s.request = t.request
), gap AS (
  SELECT *, (end_at_ns - lag(end_at_ns) OVER token) / 1e6 AS gap_ms,
         step - lag(step) OVER token - 1 AS steps_between
  FROM reached WHERE reach >= prompt_tokens AND (before IS NULL OR reach > before)
  WINDOW token AS (PARTITION BY run_id, request ORDER BY seq)
), longest AS (
  SELECT * FROM gap WHERE gap_ms IS NOT NULL ORDER BY gap_ms DESC, seq LIMIT $gaps
)
SELECT l.request_id, l.at_unix_us, round(gap_ms, 3) AS gap_ms, steps_between, l.step,
       round(i.tile_ns / 1e6, 3) AS step_ms, len(i.requests) AS batch_rows, i.prefill_tokens,
       i.decode_tokens, i.waiting
FROM longest l JOIN tile i USING (run_id, generation, seq)
ORDER BY gap_ms DESC, l.seq
