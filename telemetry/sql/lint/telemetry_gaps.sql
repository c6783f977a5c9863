-- title: Telemetry gaps
-- meaning: The record misses something: iterations that the engine dropped because the server was
--   slow, or published records that never reached this history.
-- unit: records
-- chart: table
-- window: yes
-- parameter: lost_max integer 0..1000000000 = 0; nothing should ever be lost
WITH dropped AS (
  SELECT run_id, generation, 'dropped by the engine' AS what, sum(lost_before) AS lost,
         min(at_unix_us) AS first_at_unix_us
  FROM tile WHERE lost_before > 0 GROUP BY ALL
), reach AS (
  SELECT run_id, min(seq) AS first_seq, max(seq) AS last_seq FROM tile GROUP BY run_id
), later AS (
  SELECT run_id, max(seq) AS end_seq FROM iteration
  WHERE run_id IN (SELECT run_id FROM telemetry_lost) GROUP BY run_id
), missed AS (
  SELECT l.run_id, l.generation, 'not in this history' AS what, sum(l.lost) AS lost,
         NULL::BIGINT AS first_at_unix_us
  FROM telemetry_lost l JOIN reach r USING (run_id) JOIN later e USING (run_id)
  WHERE l.to_seq >= r.first_seq AND (l.from_seq <= r.last_seq OR r.last_seq = e.end_seq)
  GROUP BY ALL
)
SELECT run_id, generation, what, lost, first_at_unix_us
FROM (FROM dropped UNION ALL FROM missed) WHERE lost > $lost_max
ORDER BY run_id, generation, what
