-- title: Neighbour stalls
-- meaning: The requests that lost most time to others in their batch, the neighbour whose prompt
--   was largest beside them, and how far the step model that split the time was off.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: requests integer 1..200 = 10; how many requests to show
WITH stalls AS (
  SELECT c.run_id, c.request, any_value(c.rule) AS rule,
         coalesce(sum(c.ns) FILTER (c.cause = 'neighbour_prefill'), 0) / 1e6 AS prefill_ms,
         coalesce(sum(c.ns) FILTER (c.cause = 'neighbour_decode'), 0) / 1e6 AS decode_ms
  FROM request_cause c SEMI JOIN ended e ON e.run_id = c.run_id AND e.request = c.request
  WHERE c.cause IN ('neighbour_prefill', 'neighbour_decode') GROUP BY ALL
), worst AS (
  SELECT e.run_id, e.request, e.seq, request_id, tenant, at_unix_us, e2e_ms, iterations, rule,
         first_scheduled_at_ns, decided_at_ns, prefill_ms, decode_ms
  FROM stalls s JOIN ended e ON e.run_id = s.run_id AND e.request = s.request
  ORDER BY prefill_ms + decode_ms DESC, at_unix_us LIMIT $requests
), shared AS (
  SELECT w.run_id, w.request, i.requests, unnest(i.requests) AS neighbour,
         unnest(i.start_positions) AS start_position, unnest(i.token_counts) AS token_count
  FROM worst w
  JOIN iteration i ON i.run_id = w.run_id
    AND i.end_at_ns > w.first_scheduled_at_ns AND i.begin_at_ns < w.decided_at_ns
  WHERE i.end_at_ns > (SELECT min(first_scheduled_at_ns) FROM worst)
), beside AS (
  SELECT h.run_id, h.request, h.neighbour,
         sum(greatest(0, least(token_count, s.prompt_tokens - start_position))) AS prefill_tokens
  FROM shared h
  JOIN request_start s ON s.run_id = h.run_id AND s.request = h.neighbour
  WHERE h.neighbour <> h.request AND list_contains(h.requests, h.request) GROUP BY ALL
), named AS (
  SELECT b.run_id, b.request, arg_max(s.request_id, b.prefill_tokens) AS neighbour,
         max(b.prefill_tokens) AS neighbour_prefill_tokens
  FROM beside b JOIN request_start s ON s.run_id = b.run_id AND s.request = b.neighbour
  WHERE b.prefill_tokens > 0 GROUP BY ALL
), model AS (
  SELECT w.run_id, w.request, arg_max(m.error, m.seq) AS error
  FROM worst w JOIN step_model m ON m.run_id = w.run_id AND m.seq < w.seq GROUP BY ALL
)
SELECT request_id, tenant, at_unix_us AS ended_at_unix_us,
       round(prefill_ms + decode_ms, 3) AS stall_ms,
       round(prefill_ms, 3) AS neighbour_prefill_ms, round(decode_ms, 3) AS neighbour_decode_ms,
       round((prefill_ms + decode_ms) / nullif(e2e_ms, 0), 4) AS share, iterations,
       neighbour AS largest_neighbour, neighbour_prefill_tokens, rule,
       round(error, 4) AS model_error
FROM worst LEFT JOIN named USING (run_id, request) LEFT JOIN model USING (run_id, request)
ORDER BY stall_ms DESC, ended_at_unix_us, request
