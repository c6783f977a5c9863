-- title: Faults
-- meaning: What broke, when and where, the newest first, and how many requests ended with an
--   error within a second of it.
-- unit: faults
-- chart: table
-- window: yes
-- parameter: faults integer 1..1000 = 50; how many to show
WITH fallen AS (
  SELECT f.*, s.started_unix_us + fault_at_ns // 1000 AS at_unix_us
  FROM fault f JOIN span s ON s.run_id = f.run_id AND fault_at_ns >= s.begin_ns
    AND fault_at_ns < s.end_ns
  ORDER BY at_unix_us DESC, f.seq DESC LIMIT $faults
), hurt AS (
  SELECT f.run_id, f.seq, count(*) AS errors
  FROM fallen f JOIN request_end e ON e.run_id = f.run_id AND e.finish = 'error'
    AND e.decided_at_ns >= f.fault_at_ns - 1000000000
    AND e.decided_at_ns < f.fault_at_ns + 1000000000
  GROUP BY ALL
)
SELECT at_unix_us, generation, step, "where", error, coalesce(errors, 0) AS requests_in_error,
       traceback
FROM fallen LEFT JOIN hurt USING (run_id, seq) ORDER BY at_unix_us DESC, seq DESC
