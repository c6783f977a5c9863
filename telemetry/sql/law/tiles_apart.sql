-- title: tiles do not overlap
-- meaning: A step's time begins before the one before it ended.
-- unit: ns
-- chart: table
-- window: yes
WITH placed AS (
  SELECT run_id, generation, step, begin_at_ns,
         lag(end_at_ns) OVER (PARTITION BY run_id, generation ORDER BY step) AS before_ns
  FROM tile
)
SELECT run_id, generation, step, begin_at_ns, before_ns
FROM placed WHERE before_ns > begin_at_ns ORDER BY run_id, generation, step
