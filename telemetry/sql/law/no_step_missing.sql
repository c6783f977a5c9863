-- title: no step is missing
-- meaning: Steps are missing that no loss on record accounts for.
-- unit: steps
-- chart: table
-- window: yes
WITH placed AS (
  SELECT t.run_id, t.generation, t.seq, t.step, t.lost_before, t.begin_at_ns,
         lag(t.step) OVER steps AS step_before, lag(t.seq) OVER steps AS seq_before
  FROM tile t WINDOW steps AS (PARTITION BY t.run_id, t.generation ORDER BY t.step)
), first_left AS (
  SELECT run_id, min(seq) AS seq FROM request_start GROUP BY run_id
), missing AS (
  -- The first step within the window has nobody to compare with, unless its engine's own start is.
  SELECT p.run_id, p.generation, p.step, p.lost_before, p.seq,
         coalesce(p.seq_before, r.seq) AS after, p.step - coalesce(p.step_before, 0) - 1 AS skipped
  FROM placed p JOIN span w ON w.run_id = p.run_id
  LEFT JOIN run r ON r.run_id = p.run_id AND r.generation = p.generation
  LEFT JOIN first_left f ON f.run_id = p.run_id
  WHERE p.step_before IS NOT NULL
     OR (w.begin_ns <= 0 AND (f.seq < p.seq OR f.seq IS NULL) AND p.generation = 1)
)
SELECT run_id, generation, step, skipped, lost_before
FROM missing m
WHERE skipped <> lost_before
  AND NOT EXISTS (
    FROM telemetry_lost l WHERE l.run_id = m.run_id AND l.to_seq >= coalesce(m.after, 0)
      AND l.from_seq <= m.seq)
ORDER BY run_id, generation, step
