-- title: Shapes that the device carried
-- meaning: Steps by kind and bucket: how many, how many replayed a graph, how much was padding.
-- unit: steps
-- chart: bars
-- window: yes
WITH shape AS (
  SELECT CASE WHEN len(requests) = 0 THEN 'empty' WHEN prefill_tokens = 0 THEN 'decode'
              WHEN decode_tokens = 0 THEN 'prefill' ELSE 'mixed' END AS kind,
         bucket, graph, prefill_tokens + decode_tokens AS tokens,
         padding_tokens + idle_rows AS padding, tile_ns, device_ns, len(requests) AS batch_rows
  FROM tile
)
SELECT kind || CASE WHEN bucket > 0 THEN ' ' || bucket ELSE '' END AS shape, count(*) AS steps,
       count(*) FILTER (graph) AS graph_steps, round(avg(batch_rows), 3) AS batch_rows,
       sum(tokens) AS tokens, sum(padding) AS padding_tokens,
       round(sum(padding) / nullif(sum(tokens) + sum(padding), 0), 4) AS padding_share,
       round(median(device_ns) / 1e6, 3) AS device_p50_ms,
       round(sum(tile_ns) / nullif(sum(sum(tile_ns)) OVER (), 0), 4) AS share_of_time
FROM shape GROUP BY kind, bucket ORDER BY steps DESC, shape
