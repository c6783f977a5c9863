-- title: steps stay within the budget
-- meaning: A step computed more tokens than its budget.
-- unit: tokens
-- chart: table
-- window: yes
SELECT run_id, generation, step, list_sum(token_counts) AS row_tokens, token_budget
FROM tile WHERE list_sum(token_counts) > token_budget ORDER BY run_id, generation, step
