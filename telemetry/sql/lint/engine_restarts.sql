-- title: Engine restarts
-- meaning: An engine died or was replaced and another one was started in the same server: every
--   request in flight was lost to its client.
-- unit: engines
-- chart: table
-- window: yes
-- parameter: restarts_max integer 0..1000000 = 0; an engine lives as long as its server
WITH begun AS (
  SELECT r.run_id, r.generation, r.seq, arg_max(f.fault_at_ns, f.seq) AS fault_at_ns,
         arg_max(f.error, f.seq) AS error, arg_max(f."where", f.seq) AS "where"
  FROM run r LEFT JOIN fault f
    ON f.run_id = r.run_id AND f.seq < r.seq AND f.generation = r.generation - 1
  WHERE r.generation > 1 GROUP BY ALL
), stepped AS (
  SELECT run_id, generation, min(begin_at_ns) AS begin_at_ns, max(end_at_ns) AS end_at_ns
  FROM iteration WHERE run_id IN (SELECT run_id FROM begun) GROUP BY ALL
), restarted AS (
  SELECT b.run_id, b.generation, coalesce(b.fault_at_ns, s.begin_at_ns, p.end_at_ns, 0) AS at_ns,
         b."where", b.error, p.end_at_ns AS last_step_at_ns, s.begin_at_ns AS next_step_at_ns
  FROM begun b LEFT JOIN stepped s USING (run_id, generation)
  LEFT JOIN stepped p ON p.run_id = b.run_id AND p.generation = b.generation - 1
), told AS (
  SELECT r.*, w.started_unix_us + at_ns // 1000 AS at_unix_us, count(*) OVER (
           PARTITION BY r.run_id) AS restarts
  FROM restarted r JOIN span w ON w.run_id = r.run_id AND at_ns >= w.begin_ns AND at_ns < w.end_ns
)
SELECT run_id, generation, at_unix_us, "where", error,
       round((next_step_at_ns - last_step_at_ns) / 1e9, 3) AS without_steps_s
FROM told WHERE restarts > $restarts_max ORDER BY run_id, generation
