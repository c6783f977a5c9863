-- title: Faults that ended no engine
-- meaning: A step raised or a part of the product met what it did not expect; serving went on.
-- unit: faults
-- chart: table
-- window: yes
-- parameter: faults_max integer 0..1000000 = 0; every fault is ours to look at
WITH fallen AS (
  SELECT f.*, w.started_unix_us + f.fault_at_ns // 1000 AS at_unix_us
  FROM fault f JOIN span w ON w.run_id = f.run_id AND f.fault_at_ns >= w.begin_ns
    AND f.fault_at_ns < w.end_ns
  WHERE f."where" NOT IN ('engine process', 'engine loop', 'engine start')
    -- What the recorder says of a crash repeats the fault that made it record.
    AND NOT (f."where" = 'flight recorder' AND starts_with(f.error, 'crash: '))
), grouped AS (
  SELECT run_id, "where", error, count(*) AS faults, min(at_unix_us) AS first_at_unix_us,
         max(at_unix_us) AS last_at_unix_us, min(step) AS first_step
  FROM fallen GROUP BY ALL
)
SELECT run_id, "where", error, faults, first_at_unix_us, last_at_unix_us, first_step
FROM grouped WHERE faults > $faults_max ORDER BY run_id, faults DESC, error
