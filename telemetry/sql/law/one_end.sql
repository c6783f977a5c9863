-- title: each start has exactly one end
-- meaning: A request ended twice, or has no end although its engine is gone or it is open for
--   very long.
-- unit: requests
-- chart: table
-- window: yes
-- parameter: open_s_max number 0..1000000000 = 3600; a request of the newest engine may still be
--   alive for so long; 0 where everything should have ended
WITH started AS (
  SELECT s.run_id, s.generation, s.request, s.request_id, s.arrived_at_ns, count(e.request) AS ends
  FROM request_start s JOIN span w ON w.run_id = s.run_id AND s.arrived_at_ns < w.end_ns
  LEFT JOIN request_end e ON e.run_id = s.run_id AND e.request = s.request
  WHERE e.request IS NULL OR e.released_at_ns >= w.begin_ns
  GROUP BY ALL HAVING ends <> 1
), engines AS (
  SELECT run_id, max(generation) AS generation FROM run GROUP BY run_id
), now AS (
  SELECT (newest_us - started_unix_us) * 1000 AS now_ns, run_id FROM newest, last_life
  WHERE run_id = (SELECT arg_max(run_id, started_unix_us) FROM run)
)
SELECT s.run_id, s.generation, s.request, s.request_id, ends,
       w.started_unix_us + s.arrived_at_ns // 1000 AS arrived_at_unix_us
FROM started s JOIN span w ON w.run_id = s.run_id
LEFT JOIN engines g ON g.run_id = s.run_id AND g.generation = s.generation
LEFT JOIN now n ON n.run_id = s.run_id
WHERE ends > 1 OR g.run_id IS NULL OR n.run_id IS NULL
   OR n.now_ns - s.arrived_at_ns >= $open_s_max * 1e9
ORDER BY s.run_id, s.request
