"""The line of those who wait: order by group and rank, and leaving it without being its head.

What the scheduler decides about the line is in test_scheduler.py and test_policies.py; here is the
structure alone, over the real core's requests.
"""

import random

from engine.waiting import REBUILD_SLACK, WaitingLine
from tests.simulation import Simulation


def test_the_dead_never_outnumber_the_waiting_by_more_than_the_slack() -> None:
    """Aborts in the middle of a long line cost memory only until its heaps are rebuilt."""
    simulation = Simulation(max_num_seqs=1, kv_blocks=64)
    simulation.add("A", 4, 100)
    simulation.step()
    numbers = [simulation.add(f"w{turn}", 4, 2) for turn in range(400)]
    line = simulation.scheduler.roster.waiting
    random.Random(1).shuffle(numbers)
    for left, number in enumerate(reversed(numbers[1:]), start=1):
        simulation.cancel(simulation.names[number])
        assert len(line) == len(numbers) - left == len(line.requests())
        assert entries(line) <= 2 * len(line) + REBUILD_SLACK + 1
    simulation.drain()
    assert entries(line) == len(line) == 0


def test_heads_that_ended_are_dropped_as_they_surface() -> None:
    """Enough of them, one by one: the count of the dead stays true, so a later rebuild is due."""
    simulation = Simulation(max_num_seqs=1, kv_blocks=64)
    simulation.add("A", 4, 100)
    simulation.step()
    line = simulation.scheduler.roster.waiting
    for turn in range(3 * REBUILD_SLACK):
        simulation.add(f"w{turn}", 4, 2)
        simulation.cancel(f"w{turn}")
        simulation.step()
        assert entries(line) == 0
    assert dead(line) == 0


def entries(line: WaitingLine) -> int:
    return sum(len(heap) for heap in line._heaps.values())


def dead(line: WaitingLine) -> int:
    return line._stale
