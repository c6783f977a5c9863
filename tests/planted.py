"""Each closed cause planted once: a small life on the real core in which that cause must show.

Owns the plants by name of the cause; test_explain.py divides each life in both ways. A plant says
which request carries the cause and, where somebody is behind it, who. Fakes only the three seams.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Request
from tests.lives import Published, published


@dataclass(frozen=True)
class Plant:
    """A life with one cause planted; `behind` is whom that cause names."""

    emit: Published
    request_id: str
    behind: str | None = None


def _alone() -> Plant:
    simulation, emit = published()
    simulation.add("A", 8, 3)
    simulation.drain()
    return Plant(emit, "req-A")


def _host_time() -> Plant:
    """Time passes between steps while nobody computes: the host's own."""
    simulation, emit = published()
    simulation.add("A", 8, 3)
    while simulation.core.has_work:
        simulation.clock.ns += 50_000
        simulation.step()
    return Plant(emit, "req-A")


def _batch_closed() -> Plant:
    simulation, emit = published(batching="static", kv_blocks=16)
    simulation.add("A", 8, 5)
    simulation.step()
    simulation.add("B", 8, 2)
    simulation.drain()
    return Plant(emit, "req-B")


def _no_slot() -> Plant:
    simulation, emit = published(max_num_seqs=1)
    simulation.add("A", 8, 3)
    simulation.add("B", 8, 3)
    simulation.add("C", 8, 3)
    simulation.drain()
    return Plant(emit, "req-C", "req-B")


def _no_budget() -> Plant:
    simulation, emit = published(max_num_batched_tokens=8, kv_blocks=16)
    simulation.add("A", 60, 2)
    simulation.step()
    simulation.add("B", 8, 2)
    simulation.add("C", 8, 2)
    simulation.drain()
    return Plant(emit, "req-C", "req-B")


def _prefill_cap() -> Plant:
    simulation, emit = published(kv_blocks=16, long_prefill_tokens=8, partial_prefills_max=1)
    simulation.add("A", 4, 4)
    simulation.add("B", 20, 2)
    simulation.add("C", 20, 2)
    simulation.add("D", 20, 2)
    simulation.drain()
    return Plant(emit, "req-D", "req-C")


def _dependency() -> Plant:
    """B's grammar, say, needs three steps to be prepared."""
    late: list[int] = []

    def is_ready(request: Request) -> bool:
        late.append(request.number)
        return request.number == 1 or len(late) > 3

    simulation, emit = published(is_ready=is_ready)
    simulation.add("A", 8, 8)
    simulation.step()
    simulation.add("B", 8, 2)
    simulation.drain()
    return Plant(emit, "req-B")


def _slo() -> Plant:
    """C's long prompt takes the whole share that A and B's gaps leave: D waits behind nobody."""
    simulation, emit = published(
        scheduling_policy="slo",
        max_num_batched_tokens=96,
        kv_blocks=64,
        max_model_len=512,
        ttft_ms=1.5,
        tpot_ms=1.3,
    )
    for number in range(13):
        simulation.add(f"t{number}", 10 + 5 * number, 16)
        simulation.drain()
    simulation.add("A", 8, 40)
    simulation.add("B", 8, 40)
    simulation.step(4)
    simulation.add("C", 200, 2)
    simulation.add("D", 100, 2)
    simulation.drain()
    return Plant(emit, "req-D")


def _no_blocks() -> Plant:
    simulation, emit = published(kv_blocks=4)
    simulation.add("A", 40, 8)
    simulation.add("B", 40, 2)
    simulation.add("C", 8, 2)
    simulation.drain()
    return Plant(emit, "req-C", "req-B")


def _quota() -> Plant:
    """A tenant at its quota, and nobody behind it to overtake."""
    simulation, emit = published(scheduling_policy="fair", kv_blocks=16, tenant_seqs_max=1)
    simulation.add("A", 8, 4, tenant="loud")
    simulation.add("B", 8, 4, tenant="loud")
    simulation.drain()
    return Plant(emit, "req-B")


def _neighbour_prefill() -> Plant:
    simulation, emit = published(kv_blocks=64, max_model_len=512)
    simulation.add("A", 8, 8)
    simulation.step()
    simulation.add("B", 100, 2)
    simulation.drain()
    return Plant(emit, "req-A", "req-B")


def _neighbour_decode() -> Plant:
    simulation, emit = published()
    simulation.add("A", 8, 8)
    simulation.add("B", 8, 8)
    simulation.drain()
    return Plant(emit, "req-A", "req-B")


def _preempted_for_blocks() -> Plant:
    simulation, emit = published(kv_blocks=5)
    simulation.add("A", 30, 30)
    simulation.add("B", 14, 30)
    simulation.drain()
    return Plant(emit, "req-B", "req-A")


def _recompute() -> Plant:
    plant = _preempted_for_blocks()
    return Plant(plant.emit, plant.request_id)


def _preempted_by_policy() -> Plant:
    simulation, emit = published(scheduling_policy="priority", max_num_seqs=2, kv_blocks=16)
    simulation.add("A", 8, 6, priority=1)
    simulation.add("B", 8, 6, priority=1)
    simulation.step(2)
    simulation.add("C", 8, 3, priority=0)
    simulation.drain()
    return Plant(emit, "req-B", "req-C")


def _overtaken() -> Plant:
    """A tenant at its quota: the other tenant's head is admitted before B."""
    simulation, emit = published(
        scheduling_policy="fair", max_num_seqs=3, kv_blocks=16, tenant_seqs_max=1
    )
    simulation.add("A", 8, 4, tenant="loud")
    simulation.add("B", 8, 4, tenant="loud")
    simulation.add("Q", 8, 4, tenant="quiet")
    simulation.drain()
    return Plant(emit, "req-B")


def _held() -> Plant:
    simulation, emit = published(batching="static", kv_blocks=16)
    simulation.add("A", 8, 2)
    simulation.add("B", 8, 6)
    simulation.drain()
    return Plant(emit, "req-A")


def _padded() -> Plant:
    """B's rows weigh on, idle, while A goes on alone."""
    simulation, emit = published(batching="static", kv_blocks=16)
    simulation.add("A", 8, 6)
    simulation.add("B", 8, 2)
    simulation.drain()
    return Plant(emit, "req-A")


def _stalled() -> Plant:
    """The client reads nothing for 3 ms after the engine's end."""
    simulation, emit = published()
    emit.deliver = False
    simulation.add("A", 8, 3)
    simulation.drain()
    end = emit.ends[1]
    emit.publish_delivery(end, stall_ns=3_000_000, last_write_at_ns=end.released_at_ns + 3_100_000)
    return Plant(emit, "req-A")


def _lossy() -> Plant:
    simulation, emit = published()
    emit.loses = lambda iteration: iteration.step in (4, 5)
    simulation.add("A", 8, 8)
    simulation.drain()
    return Plant(emit, "req-A")


PLANTS: dict[str, Callable[[], Plant]] = {
    "tokenize": _alone,
    "step_boundary": _alone,
    "queue_batch_closed": _batch_closed,
    "queue_seqs": _no_slot,
    "queue_budget": _no_budget,
    "queue_prefill_cap": _prefill_cap,
    "queue_dependency": _dependency,
    "queue_slo": _slo,
    "queue_kv": _no_blocks,
    "queue_policy": _quota,
    "own_prefill": _alone,
    "own_decode": _alone,
    "neighbour_prefill": _neighbour_prefill,
    "neighbour_decode": _neighbour_decode,
    "recompute": _recompute,
    "preempted_kv": _preempted_for_blocks,
    "preempted_policy": _preempted_by_policy,
    "passed_over": _overtaken,
    "batch_held": _held,
    "scheduler": _host_time,
    "padding": _padded,
    "output": _alone,
    "client_stall": _stalled,
    "unexplained": _lossy,
}
