-- title: a blocker stands where admission stopped
-- meaning: Admission stopped without naming whom it refused, or named one without stopping.
-- unit: steps
-- chart: table
-- window: yes
SELECT run_id, generation, step, admission_stop, admission_blocker
FROM tile WHERE (admission_stop = 'no_waiting') <> (admission_blocker IS NULL)
ORDER BY run_id, generation, step
