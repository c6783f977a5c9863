-- title: What changed between two windows
-- meaning: Load, speed and pressure in the window and in an earlier one of the same length, side
--   by side; the change is relative to the earlier one.
-- unit: one for each row
-- chart: table
-- window: yes
-- parameter: shift_s number 0.001..1000000000 = none; how much earlier the other window lies, s;
--   without it the two touch
WITH side AS (
  SELECT 'after' AS side, from_us, to_us FROM bounds
  UNION ALL
  SELECT 'before', from_us - by_us, to_us - by_us
  FROM bounds, (
    SELECT coalesce(($shift_s * 1000000)::BIGINT, to_us - from_us) AS by_us FROM bounds
  )
), sided AS (
  SELECT side, run_id, (from_us - started_unix_us) * 1000 AS begin_ns,
         (to_us - started_unix_us) * 1000 AS end_ns, (to_us - from_us) / 1e6 AS seconds
  FROM side, life
), step AS (
  SELECT s.side, any_value(s.seconds) AS seconds, count(*) AS steps,
         sum(prefill_tokens) AS prefill, sum(decode_tokens) AS decode,
         median(end_at_ns - begin_at_ns) / 1e6 AS tile_ms,
         quantile_cont(end_at_ns - begin_at_ns, 0.99) / 1e6 AS tile_p99_ms,
         sum(device_ns) / sum(end_at_ns - begin_at_ns) AS device_share,
         sum(end_at_ns - begin_at_ns) / 1e9 AS busy_s, avg(len(requests)) AS batch_rows,
         sum(waiting * (end_at_ns - begin_at_ns)) / sum(end_at_ns - begin_at_ns) AS waiting,
         avg(kv_blocks_peak / kv_blocks_total) AS kv_share, sum(len(preempted)) AS preemptions
  FROM iteration i
  JOIN sided s ON s.run_id = i.run_id AND i.end_at_ns >= s.begin_ns AND i.end_at_ns < s.end_ns
  LEFT JOIN engine r ON r.run_id = i.run_id AND r.generation = i.generation
  WHERE i.requests IS NOT NULL GROUP BY s.side
), request AS (
  SELECT s.side, any_value(s.seconds) AS seconds, count(*) AS ended,
         count(*) FILTER (finish = 'error') AS errors,
         count(*) FILTER (finish = 'cancelled') AS cancelled,
         median(first_write_at_ns - e.received_at_ns) / 1e6 AS ttft_ms,
         quantile_cont(first_write_at_ns - e.received_at_ns, 0.99) / 1e6 AS ttft_p99_ms,
         median(coalesce(last_write_at_ns, released_at_ns) - e.received_at_ns) / 1e6 AS e2e_ms,
         avg(prompt_tokens) AS prompt_tokens, avg(output_tokens) AS output_tokens,
         sum(cached_tokens) / nullif(sum(prompt_tokens), 0) AS cached_share
  FROM request_end e
  JOIN sided s ON s.run_id = e.run_id AND released_at_ns >= s.begin_ns
    AND released_at_ns < s.end_ns
  LEFT JOIN delivery d ON d.run_id = e.run_id AND d.request = e.request
  GROUP BY s.side
), measure AS (
  SELECT side, unnest([
    {place: 1, measure: 'requests ended', unit: 'requests/s', value: ended / seconds},
    {place: 2, measure: 'prompt length', unit: 'tokens', value: prompt_tokens},
    {place: 3, measure: 'output length', unit: 'tokens', value: output_tokens},
    {place: 4, measure: 'prefix hits', unit: 'share of prompt tokens', value: cached_share},
    {place: 5, measure: 'time to first byte, median', unit: 'ms', value: ttft_ms},
    {place: 6, measure: 'time to first byte, p99', unit: 'ms', value: ttft_p99_ms},
    {place: 7, measure: 'end to end, median', unit: 'ms', value: e2e_ms},
    {place: 8, measure: 'errors', unit: 'requests/s', value: errors / seconds},
    {place: 9, measure: 'cancelled', unit: 'requests/s', value: cancelled / seconds}
  ], recursive := true) FROM request
  UNION ALL
  SELECT side, unnest([
    {place: 10, measure: 'prefill', unit: 'tokens/s', value: prefill / seconds},
    {place: 11, measure: 'decode', unit: 'tokens/s', value: decode / seconds},
    {place: 12, measure: 'steps', unit: 'steps/s', value: steps / seconds},
    {place: 13, measure: 'step time, median', unit: 'ms', value: tile_ms},
    {place: 14, measure: 'step time, p99', unit: 'ms', value: tile_p99_ms},
    {place: 15, measure: 'device share of step time', unit: 'share', value: device_share},
    {place: 16, measure: 'busy', unit: 'share of the window', value: busy_s / seconds},
    {place: 17, measure: 'batch', unit: 'rows', value: batch_rows},
    {place: 18, measure: 'queue', unit: 'requests', value: waiting},
    {place: 19, measure: 'KV in use', unit: 'share of blocks', value: kv_share},
    {place: 20, measure: 'preemptions', unit: 'preemptions/s', value: preemptions / seconds}
  ], recursive := true) FROM step
)
SELECT measure, unit, round(max(value) FILTER (side = 'before'), 6) AS before,
       round(max(value) FILTER (side = 'after'), 6) AS after,
       round(max(value) FILTER (side = 'after') / nullif(max(value) FILTER (side = 'before'), 0)
         - 1, 4) AS change
FROM measure GROUP BY place, measure, unit ORDER BY place
