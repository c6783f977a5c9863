-- title: Slowest requests and their causes
-- meaning: The requests that took longest, received to last write, each with the three causes
--   that took most of it.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: requests integer 1..1000 = 20; how many requests to show
WITH slowest AS (
  SELECT * FROM ended ORDER BY e2e_ms DESC, at_unix_us LIMIT $requests
), ranked AS (
  SELECT c.run_id, c.request, c.cause, c.ns / 1e6 AS ms,
         row_number() OVER (PARTITION BY c.run_id, c.request ORDER BY c.ns DESC, c.cause) AS place
  FROM request_cause c SEMI JOIN slowest s ON s.run_id = c.run_id AND s.request = c.request
), causes AS (
  SELECT run_id, request,
         any_value(cause) FILTER (place = 1) AS first_cause, max(ms) FILTER (place = 1) AS first_ms,
         any_value(cause) FILTER (place = 2) AS second_cause,
         max(ms) FILTER (place = 2) AS second_ms,
         any_value(cause) FILTER (place = 3) AS third_cause, max(ms) FILTER (place = 3) AS third_ms,
         coalesce(max(ms) FILTER (cause = 'unexplained'), 0) AS unexplained_ms
  FROM ranked GROUP BY ALL
)
SELECT request_id, tenant, at_unix_us AS ended_at_unix_us, round(e2e_ms, 3) AS e2e_ms,
       round(ttft_ms, 3) AS ttft_ms, round(waited_ms, 3) AS waited_ms,
       prompt_tokens, cached_tokens, output_tokens, preemptions, finish,
       first_cause, round(first_ms, 3) AS first_ms,
       second_cause, round(second_ms, 3) AS second_ms,
       third_cause, round(third_ms, 3) AS third_ms, round(unexplained_ms, 3) AS unexplained_ms
FROM slowest LEFT JOIN causes USING (run_id, request)
ORDER BY e2e_ms DESC, ended_at_unix_us, request
