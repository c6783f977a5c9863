-- What every windowed query begins with: the window, and the record cut to it.
--
-- bounds     from_us, to_us: the window on the wall clock, [from, to); without `to_unix_us` it ends
--            with the newest record, without `from_unix_us` it is `last_s` long
-- span       one row for each life of a server: the window in that life's own nanoseconds
-- tile       the iterations that ended in the window, with their run's limits
-- tile_slice the same, one row for each request of each iteration
-- ended      the sequences whose end was handed over in the window, with their delivery
--
-- Nothing here is computed unless the query reads it, and the cut comes before anything else:
-- DuckDB skips whole row groups by it.
life AS (
  SELECT run_id, min(started_unix_us) AS started_unix_us FROM run
  WHERE $run_id IS NULL OR run_id = $run_id GROUP BY run_id
), last_life AS (
  SELECT arg_max(run_id, started_unix_us) AS run_id, max(started_unix_us) AS started_unix_us
  FROM life
), newest AS (
  SELECT started_unix_us + coalesce(greatest(
    (SELECT max(end_at_ns) FROM iteration WHERE run_id = (SELECT run_id FROM last_life)),
    (SELECT max(released_at_ns) FROM request_end WHERE run_id = (SELECT run_id FROM last_life)),
    (SELECT max(last_write_at_ns) FROM delivery WHERE run_id = (SELECT run_id FROM last_life)),
    (SELECT max(arrived_at_ns) FROM request_start WHERE run_id = (SELECT run_id FROM last_life)),
    (SELECT max(rejected_at_ns) FROM rejection WHERE run_id = (SELECT run_id FROM last_life)),
    (SELECT max(fault_at_ns) FROM fault WHERE run_id = (SELECT run_id FROM last_life))
  ), 0) // 1000 AS newest_us
  FROM last_life
), bounds AS (
  SELECT least(coalesce($to_unix_us, newest_us + 1), newest_us + 1) AS to_us,
         greatest(
           coalesce(
             $from_unix_us,
             coalesce($to_unix_us, newest_us + 1) - ($last_s * 1000000)::BIGINT
           ),
           (SELECT min(started_unix_us) FROM life)
         ) AS from_us
  FROM newest
), span AS (
  SELECT run_id, started_unix_us, from_us, to_us,
         (from_us - started_unix_us) * 1000 AS begin_ns,
         (to_us - started_unix_us) * 1000 AS end_ns
  FROM life, bounds
), engine AS (
  SELECT run_id, generation, any_value(kv_blocks_total) AS kv_blocks_total,
         any_value(block_tokens) AS block_tokens, any_value(seqs_max) AS seqs_max
  FROM run GROUP BY ALL
), tile AS NOT MATERIALIZED (
  SELECT i.*, s.started_unix_us + i.end_at_ns // 1000 AS at_unix_us,
         i.end_at_ns - i.begin_at_ns AS tile_ns,
         r.kv_blocks_total, r.block_tokens, r.seqs_max
  FROM iteration i
  JOIN span s ON i.run_id = s.run_id AND i.end_at_ns >= s.begin_ns AND i.end_at_ns < s.end_ns
  LEFT JOIN engine r ON r.run_id = i.run_id AND r.generation = i.generation
), tile_slice AS NOT MATERIALIZED (
  SELECT run_id, generation, seq, step, begin_at_ns, end_at_ns, tile_ns, at_unix_us,
         unnest(range(len(requests))) AS "row", unnest(requests) AS request,
         unnest(start_positions) AS start_position, unnest(token_counts) AS token_count,
         unnest(kv_block_counts) AS kv_block_count
  FROM tile
), ended AS NOT MATERIALIZED (
  SELECT e.*, s.started_unix_us + e.released_at_ns // 1000 AS at_unix_us,
         d.tokenized_at_ns, d.submitted_at_ns, d.first_write_at_ns, d.last_write_at_ns,
         d.stall_ns, e.finish IN ('stop', 'length') AS served,
         (d.first_write_at_ns - e.received_at_ns) / 1e6 AS ttft_ms,
         (d.last_write_at_ns - d.first_write_at_ns) / 1e6
           / nullif(greatest(e.output_tokens - 1, 0), 0) AS tpot_ms,
         (coalesce(d.last_write_at_ns, e.released_at_ns) - e.received_at_ns) / 1e6 AS e2e_ms,
         -- An end that the next server wrote has no admission, but the first step with its tokens.
         greatest(0, coalesce(e.admitted_at_ns, e.first_scheduled_at_ns, e.decided_at_ns)
           - e.arrived_at_ns) / 1e6 AS waited_ms
  FROM request_end e
  JOIN span s ON e.run_id = s.run_id AND e.released_at_ns >= s.begin_ns
    AND e.released_at_ns < s.end_ns
  LEFT JOIN delivery d ON d.run_id = e.run_id AND d.request = e.request
)
