"""Runs of the real core under open load, on a device whose steps take what real ones do, or so.

Owns the cost of a step (fixed, prefill, decode, context), its noise (each step's own, slow drift,
rare hiccups) and Poisson arrivals; returns records with their causes, as a server publishes them.
Tests of comparisons plant a change in a cost or a setting and see whether it is found.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.plan import Plan, StepOutput
from telemetry.bus import Bus
from telemetry.explain_fold import CauseFold
from telemetry.records import Record, RequestEnd
from tests import samples
from tests.recordings import placed, published, write_file
from tests.simulation import FakeClock, FakeRunner, FakeStep, Simulation, token_of

WRITE_NS = 200_000
REQUESTS_A_SECOND = 18.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step costs in ns, and the host's part of it."""

    fixed: float = 8e6
    prefill: float = 6e4
    decode: float = 2e5
    context: float = 100.0
    host: float = 4e5


class NoisyRunner(FakeRunner):
    """Takes as long as the costs say, give or take; answers as FakeRunner does, unchecked."""

    def __init__(self, clock: FakeClock, costs: Costs, pick: random.Random) -> None:
        super().__init__(clock, 16)
        self._costs = costs
        self._pick = pick
        self._drift = 0.0

    def run(self, plan: Plan) -> FakeStep:
        costs, pick = self._costs, self._pick
        # Other work on the machine comes and goes: a drift with a memory of about 100 steps.
        self._drift = 0.99 * self._drift + pick.gauss(0, 0.004)
        noise = math.exp(self._drift + pick.gauss(0, 0.04)) * (3 if pick.random() < 0.003 else 1)
        context = sum(plan.start_positions) + len(plan.token_ids)
        device_ns = int(
            noise
            * (
                costs.fixed
                + costs.prefill * plan.prefill_tokens
                + costs.decode * plan.decode_tokens
                + costs.context * context
            )
        )
        self._clock.ns += int(costs.host * math.exp(pick.gauss(0, 0.1)))
        tokens = [
            token_of(request, index)
            for request, index, sampled in zip(
                plan.requests, plan.output_indices, plan.samples, strict=True
            )
            if sampled
        ]
        output = StepOutput(tokens=tokens, device_ns=device_ns)
        return FakeStep(output, self._clock, self._clock.ns + device_ns)


def noisy_run(
    seed: int,
    *,
    requests: int,
    costs: Costs | None = None,
    traffic: int | None = None,
    **settings: object,
) -> list[Record]:
    """Return the records of a run of so many requests; `traffic` draws them, else the seed does."""
    pick = random.Random(seed if traffic is None else traffic)
    defaults = {
        "max_model_len": 1024,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 512,
        "kv_blocks": 2000,
    }
    simulation = Simulation(**(defaults | settings))  # type: ignore[arg-type]
    runner = NoisyRunner(simulation.clock, costs or Costs(), random.Random(-1 - seed))
    simulation.runner = simulation.core._runner = runner
    clock, core, at_ns = simulation.clock, simulation.core, 0
    for number in range(requests):
        at_ns += int(pick.expovariate(REQUESTS_A_SECOND) * 1e9)
        while core.has_work and clock.ns < at_ns:
            core.step()
        if clock.ns < at_ns:
            clock.ns = at_ns
            core.wake()
        prompt = min(400, 8 + int(pick.lognormvariate(4, 0.8)))
        simulation.add(f"r{number}", prompt, 2 + int(pick.expovariate(1 / 50)))
    while core.has_work:
        core.step()
    config = msgspec.json.encode(simulation.config).decode()
    return with_causes(delivered(published(simulation.emitted, config=config)))


def delivered(records: list[Record]) -> list[Record]:
    """Return records with the server's part of each request: a fifth of a millisecond a way."""
    found: list[Record] = []
    for record in records:
        found.append(record)
        if isinstance(record, RequestEnd):
            sent = record.first_token_at_ns
            found.append(
                samples.delivery(
                    record.request,
                    received_at_ns=record.received_at_ns,
                    tokenized_at_ns=record.received_at_ns,
                    submitted_at_ns=record.received_at_ns,
                    first_write_at_ns=sent + WRITE_NS if sent else None,
                    last_write_at_ns=record.released_at_ns + WRITE_NS,
                )
            )
    return found


def with_causes(records: list[Record]) -> list[Record]:
    """Return records with those that a server's fold of them publishes, at their place."""
    bus = Bus(run_id="fold", capacity=4096)
    fold, found = CauseFold(bus), list[Record]()
    for record in records:
        bus.publish(record, b"")
        found.append(record)
        if bus.head % 1000 == 0:
            found += fold.advance()
    return found + fold.advance()


def noisy_file(path: Path, seed: int, **options: object) -> Path:
    """Write a noisy run into a file and return its path."""
    records = noisy_run(seed, **options)  # type: ignore[arg-type]
    return write_file(path, placed(records, f"run-{seed}"))
