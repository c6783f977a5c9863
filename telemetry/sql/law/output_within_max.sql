-- title: output stays within max_tokens, wasted within output
-- meaning: A request got more tokens than it may, or wasted more than it got.
-- unit: tokens
-- chart: table
-- window: yes
SELECT e.run_id, e.request, e.request_id, e.output_tokens, s.max_tokens, e.wasted_tokens
FROM ended e JOIN request_start s ON s.run_id = e.run_id AND s.request = e.request
WHERE e.output_tokens > s.max_tokens OR e.wasted_tokens > e.output_tokens
ORDER BY e.run_id, e.request
