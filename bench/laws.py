"""The conservation laws of the record, each as one SELECT that returns a row for every breach.

Owns the statement of the laws in SQL; tests and bench/whole_path.py run them against any history.
They hold for every run that lost no iteration. Never repairs and never excuses: a row is a fault.
"""

LAWS: dict[str, str] = {
    "each start has exactly one end": """
        SELECT run_id, request, count(e.request) AS ends
        FROM request_start s LEFT JOIN request_end e USING (run_id, request)
        GROUP BY ALL HAVING ends <> 1""",
    "each end has its start": """
        SELECT run_id, request FROM request_end
        ANTI JOIN request_start USING (run_id, request)""",
    "computed + lost - cached + dropped = scheduled": """
        WITH scheduled AS (
            SELECT run_id, request, sum(token_count) AS tokens FROM slice GROUP BY ALL
        ), events AS (
            SELECT run_id, step, unnest(preempted) AS request,
                   unnest(preempted_lost_tokens) AS lost, 0 AS cached FROM iteration
            UNION ALL
            SELECT run_id, step, unnest(admitted), 0, unnest(admitted_cached_tokens)
            FROM iteration
        ), moved AS (
            SELECT run_id, request, sum(lost) AS lost, sum(cached) AS cached
            FROM events GROUP BY ALL
        )
        SELECT run_id, request, e.finish, coalesce(s.tokens, 0) AS scheduled,
               prompt_tokens + output_tokens - 1 AS computed, m.lost, m.cached, dropped_tokens
        FROM request_end e
        LEFT JOIN scheduled s USING (run_id, request) LEFT JOIN moved m USING (run_id, request)
        WHERE e.finish IN ('stop', 'length') AND cancel_requested_at_ns IS NULL
          AND first_token_at_ns IS NOT NULL
          AND coalesce(s.tokens, 0) <> prompt_tokens + output_tokens - 1
              + coalesce(m.lost, 0) - coalesce(m.cached, 0) + dropped_tokens""",
    "nothing is negative": """
        SELECT run_id, request FROM request_end
        WHERE least(prompt_tokens, cached_tokens, output_tokens, recomputed_tokens,
                    dropped_tokens, wasted_tokens, preemptions, iterations) < 0""",
    "output stays within max_tokens, wasted within output": """
        SELECT run_id, request FROM request_end JOIN request_start s USING (run_id, request)
        WHERE output_tokens > s.max_tokens OR wasted_tokens > output_tokens""",
    "prefill + decode = sum of token_counts": """
        SELECT run_id, step FROM iteration
        WHERE prefill_tokens + decode_tokens <> coalesce(list_sum(token_counts), 0)""",
    "parts sum to the tile": """
        SELECT run_id, generation, step FROM iteration
        WHERE plan_ns + launch_ns + wait_ns + commit_ns + gap_ns <> end_at_ns - begin_at_ns""",
    "tiles do not overlap": """
        SELECT * FROM (
            SELECT run_id, generation, step, begin_at_ns,
                   lag(end_at_ns) OVER (PARTITION BY run_id, generation ORDER BY step) AS before
            FROM iteration)
        WHERE before > begin_at_ns""",
    "no step is missing": """
        SELECT run_id, generation, max(step) AS last, count(*) AS kept, sum(lost_before) AS lost
        FROM iteration GROUP BY ALL HAVING last <> kept + lost""",
    "steps stay within the budget": """
        SELECT run_id, step FROM iteration
        WHERE list_sum(token_counts) > token_budget""",
    "blocks stay within the pool": """
        SELECT i.run_id, step FROM iteration i JOIN run r USING (run_id, generation)
        WHERE kv_blocks_used < 0 OR kv_blocks_peak > r.kv_blocks_total
           OR kv_blocks_used + kv_blocks_cached > r.kv_blocks_total
           OR kv_tokens > kv_blocks_used * r.block_tokens""",
    "a blocker stands where admission stopped": """
        SELECT run_id, step FROM iteration
        WHERE (admission_stop = 'no_waiting') <> (admission_blocker IS NULL)""",
    "instants are in order": """
        SELECT run_id, request FROM request_end
        WHERE arrived_at_ns < received_at_ns OR admitted_at_ns < arrived_at_ns
           OR first_token_at_ns < admitted_at_ns OR decided_at_ns < first_token_at_ns
           OR released_at_ns < decided_at_ns""",
}
"""Law by law, the SELECT that finds its breaches."""
