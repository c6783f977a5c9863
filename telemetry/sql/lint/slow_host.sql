-- title: Slow host
-- meaning: Planning, committing and the gap between steps take too much of the step: the device
--   waits for the host. A deeper loop hides it; a starved CPU causes it.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: host_share_max number 0..1 = 0.2; the scheduler's budget is a few percent of a step;
--   from a fifth on throughput is lost to the host
-- parameter: steps_min integer 1..1000000 = 20; fewer steps say nothing
WITH work AS (
  SELECT run_id, generation, count(*) AS steps, sum(tile_ns) AS tile_ns, sum(plan_ns) AS plan_ns,
         sum(commit_ns) AS commit_ns, sum(gap_ns) AS gap_ns,
         max(plan_ns + commit_ns + gap_ns) AS worst
  FROM tile WHERE len(requests) > 0 GROUP BY ALL
)
SELECT run_id, generation, steps, round(tile_ns / steps / 1e6, 3) AS step_mean_ms,
       round(plan_ns / steps / 1e6, 3) AS plan_mean_ms,
       round(commit_ns / steps / 1e6, 3) AS commit_mean_ms,
       round(gap_ns / steps / 1e6, 3) AS gap_mean_ms, round(worst / 1e6, 3) AS host_max_ms,
       round((plan_ns + commit_ns + gap_ns) / tile_ns, 4) AS host_share
FROM work
WHERE steps >= $steps_min AND plan_ns + commit_ns + gap_ns > $host_share_max * tile_ns
ORDER BY run_id, generation
