-- title: Step model error
-- meaning: The newest fit of the step model is far from what steps really took: explanations and
--   the slo policy, which rest on it, are then rough.
-- unit: ratio
-- chart: table
-- window: yes
-- parameter: error_max number 0..1000000 = 0.5; mean error over mean step time: a tenth on a
--   machine of its own, two fifths where others share its cores; beyond, the split is a guess
-- parameter: steps_min number 1..1000000000 = 200; a fit of fewer steps is a first guess, of an
--   engine that is not warm yet
WITH fitted AS (
  SELECT m.*, t.at_unix_us, row_number() OVER (
           PARTITION BY m.run_id, m.generation ORDER BY m.seq DESC) AS age
  FROM step_model m JOIN tile t USING (run_id, generation, step)
)
SELECT run_id, generation, step, at_unix_us, round(error, 4) AS error, round(fixed, 1) AS fixed_ns,
       round(p, 1) AS prefill_token_ns, round(d, 1) AS decode_token_ns,
       round(c, 3) AS context_token_ns
FROM fitted WHERE age = 1 AND error > $error_max AND step >= $steps_min
ORDER BY run_id, generation
