-- title: Prefix cache hits over time
-- meaning: Prompt tokens of the requests that ended, how many of them came from the cache at
--   first admission, and that share.
-- unit: tokens
-- chart: lines
-- window: points
WITH counted AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, sum(prompt_tokens) AS prompt,
         sum(cached_tokens) AS cached, count(*) FILTER (cached_tokens > 0) AS hits,
         count(*) AS requests
  FROM ended, grid WHERE admitted_at_ns IS NOT NULL GROUP BY ALL
)
SELECT at_unix_us, coalesce(prompt, 0) AS prompt_tokens, coalesce(cached, 0) AS cached_tokens,
       round(cached / nullif(prompt, 0), 4) AS hit_share, coalesce(hits, 0) AS hit_requests,
       coalesce(requests, 0) AS requests
FROM bucket LEFT JOIN counted USING (bucket) ORDER BY at_unix_us
