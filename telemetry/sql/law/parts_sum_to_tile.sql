-- title: parts sum to the tile
-- meaning: The parts of a step's wall time do not sum to it.
-- unit: ns
-- chart: table
-- window: yes
SELECT run_id, generation, step, tile_ns,
       plan_ns + launch_ns + wait_ns + commit_ns + gap_ns AS parts_ns
FROM tile WHERE plan_ns + launch_ns + wait_ns + commit_ns + gap_ns <> tile_ns
ORDER BY run_id, generation, step
