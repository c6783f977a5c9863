-- title: Telemetry loss
-- meaning: What the record itself misses: iterations that the engine dropped when the server was
--   slow, and published records that did not reach this history.
-- unit: records
-- chart: table
-- window: no
WITH dropped AS (
  SELECT run_id, generation, sum(lost_before) AS lost_iterations, count(*) AS iterations
  FROM iteration GROUP BY ALL
), missed AS (
  SELECT run_id, generation, sum(lost) AS lost_records, min(from_seq) AS first_seq,
         max(to_seq) AS last_seq
  FROM telemetry_lost GROUP BY ALL
)
SELECT run_id, generation, coalesce(iterations, 0) AS iterations,
       coalesce(lost_iterations, 0) AS lost_iterations, coalesce(lost_records, 0) AS lost_records,
       first_seq AS first_lost_seq, last_seq AS last_lost_seq
FROM dropped FULL JOIN missed USING (run_id, generation)
WHERE lost_iterations > 0 OR lost_records > 0
ORDER BY run_id, generation
