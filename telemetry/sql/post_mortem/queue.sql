-- title: Queue by reason over time
-- meaning: Requests waiting, averaged over each bucket, by the check that kept the queue's head
--   out.
-- unit: requests
-- chart: stacked
-- window: points
WITH held AS (
  SELECT (at_unix_us - from_us) // bucket_us AS bucket, admission_stop AS reason,
         sum(waiting * tile_ns) / 1e9 AS request_s
  FROM tile, grid WHERE waiting > 0 GROUP BY ALL
), wide AS (
  SELECT bucket,
         sum(request_s) FILTER (reason = 'batch_closed') AS batch_closed,
         sum(request_s) FILTER (reason = 'seqs') AS seqs,
         sum(request_s) FILTER (reason = 'budget') AS budget,
         sum(request_s) FILTER (reason = 'prefill_cap') AS prefill_cap,
         sum(request_s) FILTER (reason = 'dependency') AS dependency,
         sum(request_s) FILTER (reason = 'slo') AS slo,
         sum(request_s) FILTER (reason = 'kv') AS kv,
         sum(request_s) FILTER (reason = 'policy') AS "policy",
         sum(request_s) FILTER (reason = 'no_waiting') AS no_waiting
  FROM held GROUP BY bucket
)
SELECT at_unix_us, round(coalesce(batch_closed, 0) / bucket_s, 4) AS batch_closed,
       round(coalesce(seqs, 0) / bucket_s, 4) AS seqs,
       round(coalesce(budget, 0) / bucket_s, 4) AS budget,
       round(coalesce(prefill_cap, 0) / bucket_s, 4) AS prefill_cap,
       round(coalesce(dependency, 0) / bucket_s, 4) AS dependency,
       round(coalesce(slo, 0) / bucket_s, 4) AS slo,
       round(coalesce(kv, 0) / bucket_s, 4) AS kv,
       round(coalesce("policy", 0) / bucket_s, 4) AS "policy",
       round(coalesce(no_waiting, 0) / bucket_s, 4) AS no_waiting
FROM bucket LEFT JOIN wide USING (bucket) ORDER BY at_unix_us
