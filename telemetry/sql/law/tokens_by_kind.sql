-- title: prefill + decode = sum of token_counts
-- meaning: A step's tokens by kind are not the sum of its rows.
-- unit: tokens
-- chart: table
-- window: yes
SELECT run_id, generation, step, prefill_tokens, decode_tokens,
       coalesce(list_sum(token_counts), 0) AS row_tokens
FROM tile WHERE prefill_tokens + decode_tokens <> coalesce(list_sum(token_counts), 0)
ORDER BY run_id, generation, step
