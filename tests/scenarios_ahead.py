"""Scenarios of two steps in flight, as a GPU has them, and of memory that runs out in a step.

Each returns a Simulation that has run; its docstring says what to see. test_timelines.py compares
their timelines with golden/; test_ahead.py says what holds for all of them.
"""

from collections.abc import Callable

from tests.simulation import Simulation


def chunked_ahead() -> Simulation:
    """C's chunks are launched one behind the other: only the last one's token is waited for."""
    simulation = Simulation(max_num_batched_tokens=16, kv_blocks=16, depth=2)
    simulation.add("A", 4, 10)
    simulation.add("C", 60, 2)
    simulation.drain()
    assert sum(end.dropped_tokens for end in simulation.emitted.ends) == 0
    return simulation


def static_ahead() -> Simulation:
    """A's end is known when its next row is in flight; after it the row idles, and C waits."""
    simulation = Simulation(batching="static", kv_blocks=16, depth=2)
    simulation.add("A", 8, 20, stop_at=2)
    simulation.add("B", 20, 6)
    simulation.step(1)
    simulation.add("C", 8, 2)
    simulation.drain()
    assert dropped(simulation) == {"A": 1}
    assert [record.idle_rows for record in simulation.emitted.iterations[2:6]] == [0, 1, 1, 1]
    return simulation


def cancelled_ahead() -> Simulation:
    """B is cancelled with a row in flight: its blocks stay until that row is back, then D runs."""
    simulation = Simulation(max_num_seqs=2, depth=2)
    simulation.add("A", 16, 12)
    simulation.add("B", 16, 12)
    simulation.add("D", 16, 3)
    simulation.step(4)
    simulation.cancel("B", delivered=2)
    simulation.drain()
    assert dropped(simulation)["B"] == 1
    return simulation


def prefix_ahead() -> Simulation:
    """B is planned when A's prompt is committed, one step back: two of its blocks are shared."""
    simulation = Simulation(enable_prefix_caching=True, kv_blocks=16, depth=2)
    simulation.add("A", 40, 6, shared=40)
    simulation.step(1)
    simulation.add("B", 40, 3, shared=40)
    simulation.drain()
    return simulation


def memory_runs_out(depth: int = 1) -> Simulation:
    """Step 3 has no memory: all of it is planned again, 8 tokens a step, and nobody ends."""
    simulation = Simulation(max_num_batched_tokens=16, kv_blocks=16, depth=depth)
    simulation.runner.fails = lambda plan: MemoryError() if plan.step == 3 else None
    simulation.add("A", 4, 6)
    simulation.add("C", 60, 2)
    simulation.drain()
    assert {end.finish for end in simulation.emitted.ends} == {"length"}
    return simulation


def memory_runs_out_ahead() -> Simulation:
    """The same at depth 2: step 3 fails as it is launched, behind step 2; nothing follows it."""
    simulation = memory_runs_out(depth=2)
    assert simulation.outputs() == memory_runs_out().outputs()
    return simulation


def memory_stays_out() -> Simulation:
    """Steps 3 and 4 have no memory: the second costs C, the newest; A goes on."""
    simulation = Simulation(max_num_batched_tokens=16, kv_blocks=16)
    simulation.runner.fails = lambda plan: MemoryError() if plan.step in (3, 4) else None
    simulation.add("A", 4, 6)
    simulation.add("C", 60, 2)
    simulation.drain()
    ends = {simulation.names[end.request]: end.finish for end in simulation.emitted.ends}
    assert ends == {"A": "length", "C": "error"}
    return simulation


def dropped(simulation: Simulation) -> dict[str, int]:
    """Return the tokens that were computed in vain, by sequence."""
    ends = simulation.emitted.ends
    return {simulation.names[end.request]: end.dropped_tokens for end in ends if end.dropped_tokens}


SCENARIOS: tuple[Callable[[], Simulation], ...] = (
    chunked_ahead,
    static_ahead,
    cancelled_ahead,
    prefix_ahead,
    memory_runs_out,
    memory_runs_out_ahead,
    memory_stays_out,
)
