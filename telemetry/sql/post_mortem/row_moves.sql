-- title: Row moves of a request
-- meaning: Each time a request's place in the batch changed, or it came back after steps without
--   it, while its KV blocks stayed its own.
-- unit: batch row
-- chart: table
-- window: no
-- parameter: request text; id of the sequence, of its HTTP request, or the client's own: the latest
WITH wanted AS (
  SELECT s.run_id, s.generation, s.request, s.arrived_at_ns
  FROM request_start s JOIN run r ON r.run_id = s.run_id AND r.generation = s.generation
  WHERE s.request_id = $request OR s.external_id = $request OR s.parent_id = $request
  ORDER BY s.request_id = $request DESC, r.started_unix_us DESC, s.seq DESC LIMIT 1
), freed AS (
  SELECT e.released_at_ns FROM request_end e
  JOIN wanted w ON w.run_id = e.run_id AND w.request = e.request
), place AS (
  SELECT i.step, i.begin_at_ns - w.arrived_at_ns AS since_ns,
         list_position(i.requests, w.request) - 1 AS batch_row, len(i.requests) AS batch_rows,
         i.kv_block_counts[list_position(i.requests, w.request)] AS kv_blocks,
         i.start_positions[list_position(i.requests, w.request)] AS start_position
  FROM iteration i JOIN wanted w ON w.run_id = i.run_id AND w.generation = i.generation
  WHERE i.run_id = (SELECT run_id FROM wanted)
    AND i.end_at_ns >= (SELECT arrived_at_ns FROM wanted)
    AND i.begin_at_ns <= coalesce((SELECT released_at_ns FROM freed), 9223372036854775807)
    AND list_contains(i.requests, w.request)
), moved AS (
  SELECT *, lag(batch_row) OVER (ORDER BY step) AS row_before,
         step - lag(step) OVER (ORDER BY step) - 1 AS steps_without
  FROM place
)
SELECT step, round(since_ns / 1e6, 3) AS since_arrival_ms, row_before, batch_row, batch_rows,
       coalesce(steps_without, 0) AS steps_without, kv_blocks, start_position
FROM moved
WHERE row_before IS NULL OR row_before <> batch_row OR steps_without > 0
ORDER BY step
