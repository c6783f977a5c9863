"""Lives on a bus for tests: the real core over fakes, published as a server would, and divided.

Owns an Emit that publishes in the server's order (and can lose iterations, as a slow server does),
deliveries made up for each end, and both ways to divide a life. Tests of explaining use it.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.messages import Gains
from telemetry.bus import Bus
from telemetry.explain_case import Case, case_from_bus
from telemetry.explain_fold import CauseFold
from telemetry.explain_walk import Walk, walk
from telemetry.records import (
    Delivery,
    Fault,
    Iteration,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
    StepModel,
)
from tests import samples
from tests.simulation import Simulation

TOKENIZE_NS, TRAVEL_NS, OUTPUT_NS = 700, 300, 4_000


class Published:
    """The core's news on a bus; `loses` says which iterations never arrive."""

    def __init__(self, capacity: int = 200_000) -> None:
        self.lost = 0
        self.bus = Bus(run_id="run-1", capacity=capacity)
        self.bus.publish(samples.run())
        self.loses: Callable[[Iteration], bool] = lambda iteration: False
        self.ends: dict[int, RequestEnd] = {}
        self.deliveries: dict[int, Delivery] = {}
        self.iterations: list[Iteration] = []
        self.models = 0
        self.deliver = True

    def start(self, record: RequestStart) -> None:
        self.bus.publish(record)

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        self.iterations.append(iteration)
        if self.loses(iteration):
            self.lost += 1
        else:
            self.bus.publish(iteration)
            self.lost = 0
        for end in ends:
            self.ends[end.request] = end
            self.bus.publish(end)
            if self.deliver:
                self.publish_delivery(end)

    def publish_delivery(self, end: RequestEnd, **changed: int | None) -> None:
        delivery = delivery_of(end, **changed)
        self.deliveries[end.request] = delivery
        self.bus.publish(delivery)

    def step_model(self, record: StepModel) -> None:
        self.models += 1
        self.bus.publish(record)

    def fault(self, record: Fault) -> None:
        self.bus.publish(record)


def delivery_of(end: RequestEnd, **changed: int | None) -> Delivery:
    """Return the server's side of a life that ended: written in one piece, soon after its end."""
    last = end.released_at_ns + OUTPUT_NS
    delivery = Delivery(
        request=end.request,
        received_at_ns=end.arrived_at_ns - TOKENIZE_NS - TRAVEL_NS,
        tokenized_at_ns=end.arrived_at_ns - TRAVEL_NS - 1,
        submitted_at_ns=end.arrived_at_ns - TRAVEL_NS,
        first_write_at_ns=last,
        last_write_at_ns=last,
        stall_ns=0,
        merged_deltas=0,
        bytes=10,
    )
    return replace(delivery, **changed)  # type: ignore[arg-type]


def published(**settings: object) -> tuple[Simulation, Published]:
    """Return a simulation whose core publishes on a bus."""
    emit = Published()
    return Simulation(emit=emit, **settings), emit  # type: ignore[arg-type]


class Told:
    """What the fold has told, by request."""

    def __init__(self, bus: Bus) -> None:
        self.fold = CauseFold(bus)
        self.causes: dict[int, dict[str, int]] = {}
        self.rules: dict[int, set[str]] = {}
        self.shares: dict[int, RequestShare] = {}

    def advance(self) -> "Told":
        for record in self.fold.advance():
            if isinstance(record, RequestCause):
                found = self.causes.setdefault(record.request, {})
                assert record.cause not in found, "a cause is told once"
                found[record.cause] = record.ns
                self.rules.setdefault(record.request, set()).add(record.rule)
            elif isinstance(record, RequestShare):
                assert record.request not in self.shares, "a share is told once"
                self.shares[record.request] = record
        return self


def walked(bus: Bus, request_id: str) -> tuple[Case, Walk]:
    """Return a life divided by going through its iterations."""
    case = case_from_bus(bus, request_id)
    assert case is not None, request_id
    return case, walk(
        case.start,
        case.end,
        case.delivery,
        case.tiles,
        prompts=case.prompts,
        prior_step=case.prior_step,
    )
