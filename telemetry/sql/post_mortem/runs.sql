-- title: Runs
-- meaning: Every engine that was started, newest first, with what it ran and its limits.
-- unit: engines
-- chart: table
-- window: no
SELECT run_id, generation, started_unix_us, replica, model, parameters, dtype, device, backend,
       policy, batching, kv_blocks_total, block_tokens, batch_tokens_max, seqs_max, model_len_max,
       revision, config
FROM run ORDER BY started_unix_us DESC, generation DESC, run_id
