-- title: Rejections
-- meaning: Requests refused before they entered the queue, by reason and tenant, and how long
--   they were told to stay away.
-- unit: requests
-- chart: bars
-- window: yes
SELECT r.reason, count(*) AS requests, r.tenant,
       min(s.started_unix_us + rejected_at_ns // 1000) AS first_at_unix_us,
       max(s.started_unix_us + rejected_at_ns // 1000) AS last_at_unix_us,
       round(avg(retry_after_s), 3) AS retry_after_mean_s
FROM rejection r JOIN span s ON s.run_id = r.run_id AND rejected_at_ns >= s.begin_ns
  AND rejected_at_ns < s.end_ns
GROUP BY r.reason, r.tenant ORDER BY requests DESC, r.reason, r.tenant
