"""The rows that run, as columns: many of them, joining and leaving in any order, and their counts.

What a plan makes of them is in test_scheduler.py; here is that columns never tell another story
than the sequences, however many there are.
"""

import random
from collections import Counter

from tests.simulation import Simulation


def test_more_rows_than_the_columns_began_with() -> None:
    """200 rows at once, of all lengths: every invariant holds at each step, every row is served."""
    simulation = Simulation(
        max_num_seqs=200, max_num_batched_tokens=4000, kv_blocks=1200, max_model_len=128
    )
    pick = random.Random(7)
    for number in range(260):
        simulation.add(f"r{number}", pick.randrange(1, 30), pick.randrange(1, 20))
    simulation.step(4)
    assert len(simulation.scheduler.roster.running) > 128
    for number in pick.sample(range(260), 60):
        simulation.cancel(f"r{number}")
    simulation.drain()
    assert simulation.scheduler.roster.table.slots_used == 0
    assert sorted(end.request for end in simulation.emitted.ends) == list(range(1, 261))


def test_an_end_counts_the_iterations_that_name_it() -> None:
    simulation = Simulation(kv_blocks=9, max_num_seqs=4)
    for number in range(12):
        simulation.add(f"r{number}", 20 + number, 30)
    simulation.drain()
    rows = Counter(
        request for record in simulation.emitted.iterations for request in record.requests
    )
    assert {end.request: end.iterations for end in simulation.emitted.ends} == rows
    assert any(end.preemptions for end in simulation.emitted.ends)
