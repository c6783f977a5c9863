-- title: Why requests waited
-- meaning: Request-seconds spent in the queue by the check that kept its head out, and which head
--   stood there longest.
-- unit: s
-- chart: bars
-- window: yes
WITH held AS (
  SELECT run_id, admission_stop AS reason, admission_blocker AS head, waiting, step,
         tile_ns / 1e9 AS tile_s
  FROM tile WHERE waiting > 0
), stood AS (
  SELECT reason, run_id, head, sum(tile_s) AS head_s
  FROM held WHERE head IS NOT NULL GROUP BY ALL
), longest AS (
  SELECT reason, arg_max(run_id, head_s) AS run_id, arg_max(head, head_s) AS request,
         max(head_s) AS head_s, count(*) AS heads
  FROM stood GROUP BY reason
), reasons AS (
  SELECT reason, sum(waiting * tile_s) AS waited_s, sum(tile_s) AS queue_s, count(*) AS steps
  FROM held GROUP BY reason
)
SELECT reason, round(waited_s, 6) AS waited_s,
       round(waited_s / nullif(sum(waited_s) OVER (), 0), 4) AS share,
       round(queue_s, 6) AS queue_s, steps, coalesce(heads, 0) AS heads,
       s.request_id AS longest_head, round(head_s, 6) AS longest_head_s
FROM reasons LEFT JOIN longest USING (reason)
LEFT JOIN request_start s ON s.run_id = longest.run_id AND s.request = longest.request
ORDER BY waited_s DESC, reason
