-- title: nothing is negative
-- meaning: A request ended with a count below zero.
-- unit: requests
-- chart: table
-- window: yes
SELECT run_id, request, request_id, prompt_tokens, cached_tokens, output_tokens, recomputed_tokens,
       dropped_tokens, wasted_tokens, preemptions, iterations
FROM ended
WHERE least(prompt_tokens, cached_tokens, output_tokens, recomputed_tokens, dropped_tokens,
            wasted_tokens, preemptions, iterations) < 0
ORDER BY run_id, request
