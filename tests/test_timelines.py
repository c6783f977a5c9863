"""Golden timelines: the scheduler's behaviour as text files that are reviewed like code.

GIVEN a scenario, WHEN the real core runs it over a fake runner, THEN its timeline is that of
golden/NAME.txt.
After a deliberate change: `python -m tests.test_timelines` writes the files anew; read the diff.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation import Simulation

GOLDEN = Path(__file__).parent / "golden"


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


def static_batch() -> Simulation:
    """A and B leave together, when B is done; A's row idles until then, and C waits for all."""
    simulation = Simulation(batching="static", kv_blocks=16)
    simulation.add("A", 8, 2)
    simulation.add("B", 20, 5)
    simulation.step(1)
    simulation.add("C", 8, 2)
    simulation.drain()
    assert simulation.emitted.iterations[2].idle_rows == 1
    return simulation


def static_cancel() -> Simulation:
    """A cancelled row of a fixed batch stays, idle, until the batch leaves."""
    simulation = Simulation(batching="static", kv_blocks=16)
    simulation.add("A", 8, 9)
    simulation.add("B", 20, 5)
    simulation.step(2)
    simulation.cancel("A")
    simulation.drain()
    return simulation


def dynamic_batch() -> Simulation:
    """A waits for company until the window ends, B comes within it, C finds it closed."""
    simulation = Simulation(batching="dynamic", window_ms=5, kv_blocks=16)
    simulation.add("A", 8, 2)
    assert simulation.core.opens_in_ns() == 5_000_000
    simulation.clock.ns += 3_000_000
    simulation.core.rest()
    simulation.add("B", 8, 3)
    simulation.clock.ns += simulation.core.opens_in_ns()
    simulation.core.rest()
    simulation.step(1)
    simulation.add("C", 8, 2)
    simulation.drain()
    return simulation


def priority_preempts() -> Simulation:
    """The slots are taken by level 1 when level 0 arrives: the latest of level 1 gives way."""
    simulation = Simulation(scheduling_policy="priority", max_num_seqs=2, kv_blocks=16)
    simulation.add("A", 8, 6, priority=1)
    simulation.add("B", 8, 6, priority=1)
    simulation.step(2)
    simulation.add("C", 8, 3, priority=0)
    simulation.drain()
    return simulation


def priority_ages() -> Simulation:
    """Z of level 1 has waited long enough: a later Y of level 0 goes after it."""
    simulation = Simulation(
        scheduling_policy="priority", max_num_seqs=1, kv_blocks=16, priority_age_ms=2
    )
    simulation.add("A", 8, 6, priority=0)
    simulation.add("Z", 8, 2, priority=1)
    simulation.step(4)
    simulation.add("Y", 8, 2, priority=0)
    simulation.drain()
    return simulation


def fair_tenants() -> Simulation:
    """Four requests of one tenant stand before one of another, which is served second."""
    simulation = Simulation(scheduling_policy="fair", max_num_seqs=1, kv_blocks=16)
    for name in "ABCD":
        simulation.add(name, 8, 2, tenant="loud")
    simulation.add("Q", 8, 2, tenant="quiet")
    simulation.drain()
    return simulation


def fair_quota() -> Simulation:
    """A tenant at its quota is passed over; the next tenant's head is admitted."""
    simulation = Simulation(
        scheduling_policy="fair", max_num_seqs=3, kv_blocks=16, tenant_seqs_max=1
    )
    simulation.add("A", 8, 4, tenant="loud")
    simulation.add("B", 8, 4, tenant="loud")
    simulation.add("Q", 8, 4, tenant="quiet")
    simulation.drain()
    return simulation


def capped_prefill() -> Simulation:
    """One prompt in part at a time, 8 tokens a step of it: C waits for prefill_cap."""
    simulation = Simulation(kv_blocks=16, long_prefill_tokens=8, partial_prefills_max=1)
    simulation.add("A", 4, 4)
    simulation.add("B", 20, 2)
    simulation.add("C", 20, 2)
    simulation.drain()
    return simulation


def prefix_hit() -> Simulation:
    """B begins as A does: it takes A's two full blocks; C, alike but for length, keeps one back."""
    simulation = Simulation(enable_prefix_caching=True, kv_blocks=12)
    simulation.add("A", 40, 3, shared=32)
    simulation.step(1)
    simulation.add("B", 44, 3, shared=32)
    simulation.drain()
    simulation.add("C", 32, 2, shared=32)
    simulation.drain()
    return simulation


def prefix_twins() -> Simulation:
    """Two equal prompts in one plan: nothing is reused before it was written."""
    simulation = Simulation(enable_prefix_caching=True, kv_blocks=12, max_num_batched_tokens=96)
    simulation.add("A", 32, 3, shared=32)
    simulation.add("B", 32, 3, shared=32)
    simulation.drain()
    return simulation


def prefix_at_border() -> Simulation:
    """A's prompt ends with its first block: B, one step later, finds that block."""
    simulation = Simulation(enable_prefix_caching=True, kv_blocks=12)
    simulation.add("A", 16, 3, shared=16)
    simulation.step(1)
    simulation.add("B", 20, 2, shared=16)
    simulation.drain()
    return simulation


def dynamic_full() -> Simulation:
    """Two requests fill the batch: it forms at once, without waiting for the window's end."""
    simulation = Simulation(batching="dynamic", window_ms=5, kv_blocks=16, max_num_seqs=2)
    simulation.add("A", 8, 2)
    assert simulation.core.opens_in_ns() == 5_000_000
    simulation.add("B", 8, 2)
    assert simulation.core.opens_in_ns() == 0
    simulation.drain()
    return simulation


def prefix_mid_chunk() -> Simulation:
    """B begins as A does while A is in mid-prompt: it takes the blocks written so far, no more."""
    simulation = Simulation(
        enable_prefix_caching=True, kv_blocks=16, max_num_batched_tokens=64, long_prefill_tokens=20
    )
    simulation.add("A", 70, 3, shared=64)
    simulation.step(2)
    simulation.add("B", 70, 3, shared=64)
    simulation.drain()
    return simulation


def siblings() -> Simulation:
    """Three choices of one prompt: the first computes it, the others share its blocks."""
    simulation = Simulation(
        enable_prefix_caching=True, kv_blocks=12, max_num_batched_tokens=24, max_num_seqs=4
    )
    for name in "ABC":
        simulation.add(name, 40, 3, shared=40, parent_id="together")
    simulation.drain()
    return simulation


def prefix_after_preemption() -> Simulation:
    """B's full blocks survived its preemption: it computes again only what was lost."""
    simulation = Simulation(enable_prefix_caching=True, kv_blocks=6)
    simulation.add("A", 30, 40)
    simulation.add("B", 30, 40)
    simulation.drain()
    return simulation


def slo_long_prompt() -> Simulation:
    """Once steps are modelled, C's long prompt goes in shares that keep A and B's gaps in time.

    The fake device takes 1 ms and 10 us a token; tpot 1.3 ms leaves some 25 tokens a step for
    prefill, beside what A and B are ahead of their due times.
    """
    simulation = Simulation(
        scheduling_policy="slo",
        max_num_batched_tokens=96,
        kv_blocks=64,
        max_model_len=512,
        ttft_ms=1.5,
        tpot_ms=1.3,
    )
    for number in range(13):  # what the model learns from: prefills of several sizes, decodes
        simulation.add(f"t{number}", 10 + 5 * number, 16)
        simulation.drain()
    simulation.emitted.iterations.clear()
    simulation.add("A", 8, 40)
    simulation.add("B", 8, 40)
    simulation.step(4)
    simulation.add("C", 200, 2)
    simulation.drain()
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
    static_batch,
    static_cancel,
    dynamic_batch,
    priority_preempts,
    priority_ages,
    fair_tenants,
    fair_quota,
    capped_prefill,
    prefix_hit,
    prefix_twins,
    prefix_at_border,
    prefix_mid_chunk,
    dynamic_full,
    siblings,
    prefix_after_preemption,
    slo_long_prompt,
)


def render(scenario: Callable[[], Simulation]) -> str:
    return f"{inspect.cleandoc(scenario.__doc__ or '')}\n\n{scenario().timeline()}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_golden(scenario: Callable[[], Simulation]) -> None:
    expected = (GOLDEN / f"{scenario.__name__}.txt").read_text()
    assert render(scenario) == expected


def test_no_golden_file_is_left_over() -> None:
    names = {scenario.__name__ for scenario in SCENARIOS}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


if __name__ == "__main__":
    for scenario in SCENARIOS:
        (GOLDEN / f"{scenario.__name__}.txt").write_text(render(scenario))
