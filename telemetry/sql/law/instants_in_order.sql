-- title: instants are in order
-- meaning: A request reached a later part of its life before an earlier one.
-- unit: requests
-- chart: table
-- window: yes
SELECT run_id, request, request_id, received_at_ns, arrived_at_ns, admitted_at_ns,
       first_token_at_ns, decided_at_ns, released_at_ns
FROM ended
WHERE arrived_at_ns < received_at_ns OR admitted_at_ns < arrived_at_ns
   OR first_token_at_ns < admitted_at_ns OR decided_at_ns < first_token_at_ns
   OR released_at_ns < decided_at_ns
ORDER BY run_id, request
