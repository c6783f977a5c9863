-- title: When requests really leave
-- meaning: By how they ended: time from the client's leave to the engine's decision, from the
--   decision to the blocks going back, and to the server's knowing; tokens computed for nobody.
-- unit: ms
-- chart: table
-- window: yes
SELECT finish || coalesce(', ' || cancel_cause, '') AS ended_by, count(*) AS requests,
       round(median(decided_at_ns - cancel_requested_at_ns) / 1e6, 3) AS cancel_to_decided_p50_ms,
       round(median(freed_at_ns - decided_at_ns) / 1e6, 3) AS decided_to_freed_p50_ms,
       round(max(freed_at_ns - decided_at_ns) / 1e6, 3) AS decided_to_freed_max_ms,
       round(median(released_at_ns - freed_at_ns) / 1e6, 3) AS freed_to_released_p50_ms,
       round(max(released_at_ns - freed_at_ns) / 1e6, 3) AS freed_to_released_max_ms,
       sum(wasted_tokens) AS wasted_tokens, sum(dropped_tokens) AS dropped_tokens
FROM ended GROUP BY finish, cancel_cause ORDER BY requests DESC, ended_by
