"""Scenarios of one scheduler: who joins, who leaves, chunks, reservation, preemption, loop depth 2.

Each returns a Simulation that has run; its docstring says what to see. test_timelines.py compares
their timelines with golden/.
"""

from collections.abc import Callable

from tests.simulation import Simulation


def six_rounds(depth: int = 1) -> Simulation:
    """Three slots: A, B, C run; D arrives; A ends; E arrives and C is cancelled."""
    simulation = Simulation(max_num_seqs=3, kv_blocks=16, depth=depth)
    simulation.add("A", 4, 3)
    simulation.add("B", 4, 8)
    simulation.add("C", 4, 8)
    simulation.step(2)
    simulation.add("D", 4, 4)
    simulation.step(2)
    simulation.add("E", 4, 3)
    simulation.cancel("C", delivered=3)
    simulation.drain()
    return simulation


def late_join() -> Simulation:
    """B joins at the next step after it arrives, beside A's decodes."""
    simulation = Simulation()
    simulation.add("A", 20, 8)
    simulation.step(3)
    simulation.add("B", 10, 3)
    simulation.drain()
    return simulation


def early_finish(depth: int = 1) -> Simulation:
    """A samples EOS at its third token: its row is D's in the very next step."""
    simulation = Simulation(max_num_seqs=2, depth=depth)
    simulation.add("A", 8, 20, stop_at=3)
    simulation.add("B", 8, 8)
    simulation.add("D", 8, 2)
    simulation.drain()
    return simulation


def row_moves() -> Simulation:
    """C's batch row moves from 2 to 0 as A and B end; its block table stays."""
    simulation = Simulation(kv_blocks=16)
    simulation.add("A", 4, 2)
    simulation.add("B", 4, 4)
    simulation.add("C", 20, 6)
    simulation.drain()
    return simulation


def chunked_prefill() -> Simulation:
    """A long prompt goes in chunks of what the decodes leave of the budget."""
    simulation = Simulation(max_num_batched_tokens=16, kv_blocks=16)
    simulation.add("A", 4, 10)
    simulation.add("B", 4, 10)
    simulation.step(1)
    simulation.add("C", 50, 3)
    simulation.drain()
    return simulation


def chunked_prefill_off() -> Simulation:
    """Without chunks a prompt waits for a step that holds it whole."""
    simulation = Simulation(
        max_num_batched_tokens=64, enable_chunked_prefill=False, kv_blocks=16, max_model_len=64
    )
    simulation.add("A", 40, 3)
    simulation.add("B", 30, 3)
    simulation.drain()
    return simulation


def reservation() -> Simulation:
    """C's first chunk would fit, the whole of C does not: it waits instead of thrashing."""
    simulation = Simulation(kv_blocks=8)
    simulation.add("A", 40, 12)
    simulation.add("B", 20, 6)
    simulation.step(1)
    simulation.add("C", 60, 2)
    simulation.drain()
    return simulation


def preemption(depth: int = 1) -> Simulation:
    """A and B outgrow the pool: the latest arrived gives way and recomputes later."""
    simulation = Simulation(kv_blocks=5, depth=depth)
    simulation.add("A", 30, 30)
    simulation.add("B", 14, 30)
    simulation.drain()
    return simulation


def preempts_itself() -> Simulation:
    """B is alone among the unplaced when blocks lack: it gives way to nobody but itself."""
    simulation = Simulation(kv_blocks=4, scheduling_policy="fcfs")
    simulation.add("A", 16, 30)
    simulation.add("B", 14, 20)
    simulation.drain()
    return simulation


def watermark_waiver() -> Simulation:
    """A request as large as the pool runs alone, whatever the watermark would keep."""
    simulation = Simulation(kv_blocks=4, max_model_len=64)
    simulation.add("A", 60, 4)
    simulation.add("B", 4, 2)
    simulation.drain()
    return simulation


def infeasible() -> Simulation:
    """What can never run ends at once and nobody waits behind it."""
    simulation = Simulation(kv_blocks=4, max_model_len=64)
    simulation.add("A", 60, 5)
    simulation.add("B", 4, 2)
    simulation.drain()
    return simulation


def fcfs_by_arrival() -> Simulation:
    """fcfs places by arrival: B waits for budget until A's last chunk leaves some of it."""
    simulation = Simulation(scheduling_policy="fcfs", max_num_batched_tokens=8, kv_blocks=16)
    simulation.add("A", 30, 3)
    simulation.step(1)
    simulation.add("B", 12, 3)
    simulation.drain()
    return simulation


def cancelled_mid_prefill() -> Simulation:
    """B leaves after its first chunk, C takes its place and its blocks in the same step."""
    simulation = Simulation(max_num_batched_tokens=16, kv_blocks=5, max_num_seqs=2)
    simulation.add("A", 10, 8)
    simulation.add("B", 40, 4)
    simulation.add("C", 20, 2)
    simulation.step(2)
    simulation.cancel("B")
    simulation.drain()
    return simulation


def cancelled_everywhere() -> Simulation:
    """D and C cancelled while waiting, B while preempted, A while decoding; all blocks return."""
    simulation = Simulation(kv_blocks=7, max_num_batched_tokens=16, max_num_seqs=3)
    simulation.add("A", 30, 40)
    simulation.add("B", 30, 40)
    simulation.add("C", 40, 4)
    simulation.add("D", 4, 4)
    simulation.step(3)
    simulation.cancel("D")
    simulation.step(22)
    simulation.cancel("B")
    simulation.step(3)
    simulation.cancel("C")
    simulation.step(1)
    simulation.cancel("A")
    simulation.drain()
    return simulation


def six_rounds_ahead() -> Simulation:
    """The six rounds at loop depth 2: ends and frees come one step later, tokens are the same."""
    simulation = six_rounds(depth=2)
    # A row of the step in flight: E joins later than at depth 1, C's late row is dropped.
    assert simulation.outputs()["A"] == six_rounds().outputs()["A"]
    return simulation


def early_finish_ahead() -> Simulation:
    """At depth 2 A's end is seen when its next row is in flight: that row is dropped."""
    simulation = early_finish(depth=2)
    (end,) = (end for end in simulation.emitted.ends if end.request_id == "req-A")
    assert end.dropped_tokens == 1
    return simulation


def preemption_ahead() -> Simulation:
    """At depth 2 B is preempted with a row in flight: its token is kept, its computing is not."""
    simulation = preemption(depth=2)
    (end,) = (end for end in simulation.emitted.ends if end.request_id == "req-B")
    assert end.dropped_tokens == 1
    assert simulation.outputs() == preemption().outputs()
    return simulation


SCENARIOS: tuple[Callable[[], Simulation], ...] = (
    six_rounds,
    late_join,
    early_finish,
    row_moves,
    chunked_prefill,
    chunked_prefill_off,
    reservation,
    preemption,
    preempts_itself,
    watermark_waiver,
    infeasible,
    fcfs_by_arrival,
    cancelled_mid_prefill,
    cancelled_everywhere,
    six_rounds_ahead,
    early_finish_ahead,
    preemption_ahead,
)
