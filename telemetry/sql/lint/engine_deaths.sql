-- title: Engine deaths and restarts
-- meaning: An engine died, or another one was started in the same server: every request in flight
--   was lost to its client.
-- unit: engines
-- chart: table
-- window: yes
-- parameter: deaths_max integer 0..1000000 = 0; an engine lives as long as its server
WITH died AS (
  SELECT run_id, generation, fault_at_ns AS at_ns, error FROM fault
  WHERE "where" = 'engine process'
), silent AS (
  -- The next engine is there and nothing says why: the fault is not on record.
  SELECT r.run_id, r.generation - 1 AS generation FROM run r
  ANTI JOIN died d ON d.run_id = r.run_id AND d.generation = r.generation - 1
  WHERE r.generation > 1
), stepped AS (
  SELECT run_id, generation, min(begin_at_ns) AS begin_at_ns, max(end_at_ns) AS end_at_ns
  FROM iteration
  WHERE run_id IN (SELECT run_id FROM died UNION SELECT run_id FROM silent) GROUP BY ALL
), gone AS (
  FROM died
  UNION ALL
  SELECT run_id, generation, coalesce(end_at_ns, 0), 'not on record'
  FROM silent LEFT JOIN stepped USING (run_id, generation)
), told AS (
  SELECT g.*, w.started_unix_us + at_ns // 1000 AS at_unix_us,
         count(*) OVER (PARTITION BY g.run_id) AS deaths
  FROM gone g JOIN span w ON w.run_id = g.run_id AND at_ns >= w.begin_ns AND at_ns < w.end_ns
)
SELECT t.run_id, t.generation, t.at_unix_us, t.error, r.generation IS NOT NULL AS restarted,
       round((n.begin_at_ns - p.end_at_ns) / 1e9, 3) AS without_steps_s
FROM told t
LEFT JOIN run r ON r.run_id = t.run_id AND r.generation = t.generation + 1
LEFT JOIN stepped p ON p.run_id = t.run_id AND p.generation = t.generation
LEFT JOIN stepped n ON n.run_id = t.run_id AND n.generation = t.generation + 1
WHERE deaths > $deaths_max ORDER BY t.run_id, t.at_unix_us
