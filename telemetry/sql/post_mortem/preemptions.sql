-- title: Preemptions
-- meaning: Each preemption: who lost its blocks, why and for whom, what was lost, and after how
--   long it came back.
-- unit: ms
-- chart: table
-- window: yes
-- parameter: preemptions integer 1..10000 = 100; how many to show, the newest first
WITH lost AS (
  SELECT run_id, generation, seq, step, begin_at_ns, at_unix_us, unnest(preempted) AS request,
         unnest(preempted_causes) AS cause, unnest(preempted_blocks) AS lost_blocks,
         unnest(preempted_lost_tokens) AS lost_tokens,
         unnest(preempted_beneficiaries) AS beneficiary
  FROM tile WHERE len(preempted) > 0
), newest_lost AS (
  SELECT * FROM lost ORDER BY at_unix_us DESC, seq DESC LIMIT $preemptions
), returned AS (
  SELECT i.run_id, i.seq, i.begin_at_ns, unnest(i.admitted) AS request
  FROM iteration i
  WHERE len(i.admitted) > 0 AND i.run_id IN (SELECT run_id FROM newest_lost)
    AND i.end_at_ns >= (SELECT min(begin_at_ns) FROM newest_lost)
), back AS (
  SELECT l.run_id, l.seq, l.request, min(r.begin_at_ns) - any_value(l.begin_at_ns) AS away_ns
  FROM newest_lost l
  JOIN returned r ON r.run_id = l.run_id AND r.request = l.request AND r.seq > l.seq
  GROUP BY ALL
)
SELECT l.at_unix_us, l.step, s.request_id, l.cause, b.request_id AS for_request,
       l.beneficiary = l.request AS left_alone, l.lost_blocks, l.lost_tokens,
       round(away_ns / 1e6, 3) AS away_ms
FROM newest_lost l LEFT JOIN back USING (run_id, seq, request)
LEFT JOIN request_start s ON s.run_id = l.run_id AND s.request = l.request
LEFT JOIN request_start b ON b.run_id = l.run_id AND b.request = l.beneficiary
ORDER BY l.at_unix_us DESC, l.seq DESC, l.request
