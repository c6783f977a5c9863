-- title: Graph misses
-- meaning: Decode-only steps that ran eagerly although this engine replays graphs: the batch is
--   larger than the largest captured size, or sizes are missing.
-- unit: steps
-- chart: table
-- window: yes
-- parameter: miss_share_max number 0..1 = 0.05; a captured size covers every usual batch, so
--   misses should be rare
-- parameter: steps_min integer 1..1000000 = 20; fewer steps say nothing
WITH decode AS (
  SELECT run_id, generation, len(requests) AS batch_rows, graph
  FROM tile WHERE prefill_tokens = 0 AND len(requests) > 0
), work AS (
  SELECT run_id, generation, count(*) AS decode_steps, count(*) FILTER (graph) AS graph_steps,
         max(batch_rows) FILTER (graph) AS largest_graph_rows,
         mode(batch_rows) FILTER (NOT graph) AS usual_missed_rows
  FROM decode GROUP BY ALL
)
SELECT run_id, generation, decode_steps, decode_steps - graph_steps AS missed_steps,
       round((decode_steps - graph_steps) / decode_steps, 4) AS miss_share, largest_graph_rows,
       usual_missed_rows
FROM work
WHERE graph_steps > 0 AND decode_steps >= $steps_min
  AND decode_steps - graph_steps > $miss_share_max * decode_steps
ORDER BY run_id, generation
