"""Scenarios of batching modes, policies, caps and the prefix cache.

Each returns a Simulation that has run; its docstring says what to see. test_timelines.py compares
their timelines with golden/.
"""

from collections.abc import Callable

from tests.simulation import Simulation


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
    dynamic_full,
    prefix_mid_chunk,
    siblings,
    prefix_after_preemption,
    slo_long_prompt,
)
