-- title: Timeline of a request
-- meaning: What happened to one request and when, from the server's first sight of it to the last
--   byte, preemptions and waits within it included.
-- unit: ms
-- chart: table
-- window: no
-- parameter: request text; id of the sequence, of its HTTP request, or the client's own: the latest
WITH wanted AS (
  SELECT s.run_id, s.generation, s.request, s.request_id, s.arrived_at_ns, s.prompt_tokens,
         s.max_tokens
  FROM request_start s JOIN run r ON r.run_id = s.run_id AND r.generation = s.generation
  WHERE s.request_id = $request OR s.external_id = $request OR s.parent_id = $request
  ORDER BY s.request_id = $request DESC, r.started_unix_us DESC, s.seq DESC LIMIT 1
), finish AS (
  SELECT e.* FROM request_end e JOIN wanted w ON w.run_id = e.run_id AND w.request = e.request
), receipt AS (
  SELECT d.* FROM delivery d JOIN wanted w ON w.run_id = d.run_id AND w.request = d.request
), life AS (
  -- A step begins with the previous commit, which may lie before the arrival that it admits.
  SELECT i.* EXCLUDE (begin_at_ns), w.request,
         greatest(i.begin_at_ns, w.arrived_at_ns) AS begin_at_ns
  FROM iteration i JOIN wanted w ON w.run_id = i.run_id AND w.generation = i.generation
  WHERE i.run_id = (SELECT run_id FROM wanted)
    AND i.end_at_ns >= (SELECT arrived_at_ns FROM wanted)
    AND i.begin_at_ns <= coalesce((SELECT released_at_ns FROM finish), 9223372036854775807)
), event AS (
  SELECT received_at_ns AS at_ns, 1 AS place, 'received' AS event, '' AS detail FROM receipt
  UNION ALL SELECT tokenized_at_ns, 2, 'tokenized', '' FROM receipt
  UNION ALL SELECT submitted_at_ns, 3, 'submitted', '' FROM receipt
  UNION ALL
  SELECT arrived_at_ns, 4, 'arrived', prompt_tokens || ' prompt tokens, at most ' || max_tokens
  FROM wanted
  UNION ALL
  SELECT begin_at_ns, 6, 'admitted', 'step ' || step || ', ' ||
         admitted_cached_tokens[list_position(admitted, request)] || ' tokens from the cache'
  FROM life WHERE list_contains(admitted, request)
  UNION ALL
  SELECT begin_at_ns, 5, 'preempted', 'step ' || step || ', cause ' ||
         preempted_causes[list_position(preempted, life.request)] || ', ' ||
         preempted_lost_tokens[list_position(preempted, life.request)] || ' tokens lost, for ' ||
         coalesce(b.request_id, '?')
  FROM life LEFT JOIN request_start b ON b.run_id = life.run_id
    AND b.request = preempted_beneficiaries[list_position(preempted, life.request)]
  WHERE list_contains(preempted, life.request)
  UNION ALL
  SELECT min(begin_at_ns), 7, 'passed over',
         count(*) || ' steps, first ' || min(step) || ', ' ||
         passed_over_reasons[list_position(passed_over, request)]
  FROM life WHERE list_contains(passed_over, request)
  GROUP BY passed_over_reasons[list_position(passed_over, request)]
  UNION ALL SELECT prefill_finished_at_ns, 8, 'prefill finished', '' FROM finish
  UNION ALL SELECT first_token_at_ns, 9, 'first token', '' FROM finish
  UNION ALL SELECT first_write_at_ns, 10, 'first write', '' FROM receipt
  UNION ALL SELECT cancel_requested_at_ns, 11, 'cancel requested', '' FROM finish
  UNION ALL
  SELECT decided_at_ns, 12, 'decided', finish || coalesce(', ' || cancel_cause, '') ||
         coalesce(', ' || error, '') || ', ' || output_tokens || ' output tokens'
  FROM finish
  UNION ALL SELECT freed_at_ns, 13, 'freed', '' FROM finish
  UNION ALL SELECT released_at_ns, 14, 'released', '' FROM finish
  UNION ALL SELECT last_write_at_ns, 15, 'last write', bytes || ' bytes' FROM receipt
)
SELECT round((at_ns - min(at_ns) OVER ()) / 1e6, 3) AS at_ms, event, detail,
       (SELECT request_id FROM wanted) AS request_id
FROM event WHERE at_ns IS NOT NULL ORDER BY at_ns, place
