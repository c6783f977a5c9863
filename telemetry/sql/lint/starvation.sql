-- title: Starvation
-- meaning: A request waited long for its first admission while later ones were admitted before
--   it.
-- unit: s
-- chart: table
-- window: yes
-- parameter: waited_s_max number 0..1000000 = 30; clients give up about then; a long queue alone
--   is overload, being overtaken for so long is starvation
-- parameter: overtaken_min integer 1..1000000 = 1; how many must have gone first
WITH opened AS (
  SELECT s.run_id, s.request, s.request_id, s.tenant, s.priority, s.arrived_at_ns,
         coalesce(e.admitted_at_ns, e.first_scheduled_at_ns) AS admitted_at_ns, e.decided_at_ns,
         e.request IS NULL AS is_open
  FROM request_start s
  JOIN span w ON w.run_id = s.run_id AND s.arrived_at_ns < w.end_ns
  LEFT JOIN request_end e ON e.run_id = s.run_id AND e.request = s.request
  WHERE e.request IS NULL OR e.released_at_ns >= w.begin_ns
), entered AS (
  SELECT i.run_id, i.begin_at_ns, unnest(i.admitted) AS request
  FROM iteration i
  WHERE len(i.admitted) > 0
    AND i.run_id IN (SELECT run_id FROM opened WHERE is_open)
    AND i.end_at_ns >= (SELECT min(arrived_at_ns) FROM opened WHERE is_open)
), first_entered AS (
  SELECT run_id, request, min(begin_at_ns) AS admitted_at_ns FROM entered GROUP BY ALL
), last_seen AS (
  SELECT run_id, max(end_at_ns) AS last_at_ns FROM tile GROUP BY run_id
), waited AS (
  SELECT o.* EXCLUDE (admitted_at_ns), coalesce(o.admitted_at_ns, f.admitted_at_ns) AS admitted_ns,
         coalesce(o.admitted_at_ns, f.admitted_at_ns, o.decided_at_ns, l.last_at_ns) AS until_ns
  FROM opened o LEFT JOIN first_entered f USING (run_id, request)
  LEFT JOIN last_seen l USING (run_id)
), suspect AS (
  SELECT * FROM waited WHERE until_ns - arrived_at_ns > $waited_s_max * 1e9
)
SELECT s.run_id, s.request_id, s.tenant, s.priority,
       round((s.until_ns - s.arrived_at_ns) / 1e9, 3) AS waited_s,
       s.admitted_ns IS NULL AS never_admitted, count(*) AS overtaken_by,
       min(o.request_id) AS for_example
FROM suspect s
JOIN waited o ON o.run_id = s.run_id AND o.arrived_at_ns > s.arrived_at_ns
  AND o.admitted_ns < s.until_ns
GROUP BY ALL HAVING overtaken_by >= $overtaken_min
ORDER BY waited_s DESC, s.run_id, s.request_id
