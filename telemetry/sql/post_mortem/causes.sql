-- title: Where the time of requests went
-- meaning: The additive causes of all requests that ended, received to last write, summed.
-- unit: s
-- chart: bars
-- window: yes
SELECT c.cause, round(sum(c.ns) / 1e9, 6) AS seconds,
       round(sum(c.ns) / nullif(sum(sum(c.ns)) OVER (), 0), 4) AS share,
       count(*) FILTER (c.ns > 0) AS requests,
       round(quantile_cont(c.ns, 0.99) / 1e6, 3) AS p99_ms,
       count(*) FILTER (c.rule = 'counted') AS counted
FROM request_cause c JOIN ended e ON e.run_id = c.run_id AND e.request = c.request
GROUP BY c.cause ORDER BY seconds DESC, c.cause
