"""A recorded stream of a big engine: the real scheduler's own records at so many steps a second.

Owns the made-up traffic and the file of frames; bench/dashboard.py serves it to the page at the
pace at which it was recorded. The core, the scheduler and the KV pool are the product's; the runner
computes nothing and the clock is set by it. Must never hold a recording in memory: an hour is
hundreds of megabytes.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.core import Core
from engine.kv import KVPool
from engine.messages import Gains, SamplingParams, Submit
from engine.plan import Plan, StepOutput
from engine.policies import POLICIES
from engine.scheduler import Scheduler
from engine.step_model import StepTimes
from telemetry.bus import KIND_NAMES
from telemetry.records import (
    SCHEMA_VERSION,
    Fault,
    Iteration,
    Record,
    RequestEnd,
    RequestStart,
    Run,
    StepModel,
)

RUN_ID = "recorded"
SENDS_PER_S = 20
WAITING = 6
"""So many wait at any time, so that a row that falls free is taken at the next step."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What engine is recorded."""

    lanes: int
    steps_per_s: int
    seconds: int

    @property
    def step_ns(self) -> int:
        """Return how long a step takes."""
        return 1_000_000_000 // self.steps_per_s


@dataclass(frozen=True, slots=True)
class Send:
    """One write to a client: where it stands in the file, and when it is due, in run time."""

    due_ns: int
    offset: int
    length: int


class SetClock:
    """A clock that the runner moves."""

    def __init__(self) -> None:
        self.instant_ns = 0

    def now_ns(self) -> int:
        """Return the time that was set."""
        return self.instant_ns

    def move(self, by_ns: int) -> None:
        """Let time pass."""
        self.instant_ns += by_ns


class PacedStep:
    """A step that ends at the next whole multiple of the beat."""

    def __init__(self, tokens: list[int], clock: SetClock, step_ns: int) -> None:
        self._tokens, self._clock, self._step_ns = tokens, clock, step_ns

    def wait(self) -> StepOutput:
        """Return what was sampled, at the end of the step."""
        left_ns = self._step_ns - self._clock.now_ns() % self._step_ns
        self._clock.move(left_ns)
        return StepOutput(tokens=self._tokens, device_ns=left_ns)


class PacedRunner:
    """Samples the same token for everybody; a tenth of a step is the host's."""

    def __init__(self, clock: SetClock, step_ns: int) -> None:
        self._clock, self._step_ns = clock, step_ns

    def run(self, plan: Plan) -> PacedStep:
        """Return a step that samples for every row that may."""
        self._clock.move(self._step_ns // 10)
        return PacedStep([7] * sum(plan.samples), self._clock, self._step_ns)

    def forget(self, request: int) -> None:
        """Know nothing of anybody."""


class Kept:
    """The records since the last look, in the order in which a server publishes them."""

    def __init__(self) -> None:
        self.lost = 0
        self.records: list[Record] = []

    def take(self) -> list[Record]:
        """Return what was kept, and keep it no longer."""
        taken, self.records = self.records, []
        return taken

    def start(self, record: RequestStart) -> None:
        """Keep it."""
        self.records.append(record)

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Keep the iteration, then who ended in it."""
        del gains  # nobody reads answers
        self.records += [iteration, *ends]

    def step_model(self, record: StepModel) -> None:
        """Keep it."""
        self.records.append(record)

    def fault(self, record: Fault) -> None:
        """Keep it."""
        self.records.append(record)


class Engine:
    """A full batch that stays full."""

    def __init__(self, shape: Shape) -> None:
        self._pick = random.Random(7)
        self._number = 0
        self.clock, self.kept = SetClock(), Kept()
        blocks = shape.lanes * 24
        config = EngineConfig(
            max_model_len=1024,
            max_num_seqs=shape.lanes,
            max_num_batched_tokens=shape.lanes + 768,
            kv_blocks=blocks,
            dtype="f32",
            enable_prefix_caching=False,
        )
        times = StepTimes()
        self.scheduler = Scheduler(
            config=config,
            pool=KVPool(blocks=blocks, block_tokens=config.block_size),
            policy=POLICIES[config.scheduling_policy](config, times),
            eos_ids=(2,),
        )
        runner = PacedRunner(self.clock, shape.step_ns)
        self.core = Core(
            scheduler=self.scheduler,
            runner=runner,
            clock=self.clock,
            emit=self.kept,
            times=times,
            depth=1,
        )
        self.config = config

    def fill(self) -> None:
        """Let so many arrive that the batch and the line are full."""
        roster = self.scheduler.roster
        full = self.config.max_num_seqs + WAITING
        while len(roster.running) + len(roster.waiting) < full:
            self._number += 1
            submit = Submit(
                request=self._number,
                request_id=f"req-{self._number}",
                prompt=[5] * self._pick.choice((24, 60, 120, 300)),
                max_tokens=self._pick.randrange(60, 240),
                sampling=SamplingParams(temperature=0.0),
                received_at_ns=self.clock.now_ns(),
            )
            self.core.add(submit)


def run_record(engine: Engine, started_unix_us: int) -> Run:
    """Return the record that opens the recording."""
    config = engine.config
    assert config.kv_blocks is not None
    assert config.max_model_len is not None
    return Run(
        replica="",
        schema_version=SCHEMA_VERSION,
        started_unix_us=started_unix_us,
        model="recorded",
        parameters=0,
        dtype=config.dtype,
        device="none",
        backend="none",
        backend_refusals="{}",
        policy=config.scheduling_policy,
        batching=config.batching,
        kv_blocks_total=config.kv_blocks,
        block_tokens=config.block_size,
        batch_tokens_max=config.max_num_batched_tokens,
        seqs_max=config.max_num_seqs,
        model_len_max=config.max_model_len,
        buckets=[],
        config="{}",
        revision="",
    )


def hello(engine: Engine, started_unix_us: int) -> bytes:
    """Return the frame that a stream begins with."""
    run = run_record(engine, started_unix_us)
    body = {"schema_version": SCHEMA_VERSION, "run_id": RUN_ID, "generation": 1}
    body |= {"run": run, "live": [], "lost": 0}
    return frame(0, "hello", msgspec.json.encode(body))


def frame(seq: int, event: str, payload: bytes) -> bytes:
    """Return one server-sent event, as server/telemetry_stream.py writes it."""
    return b"id: %s.%d\nevent: %s\ndata: %s\n\n" % (RUN_ID.encode(), seq, event.encode(), payload)


def write(path: Path, shape: Shape) -> tuple[Engine, list[Send]]:
    """Record an engine for so many seconds; returns it, and what is to be sent when."""
    engine, sends, seq, offset = Engine(shape), [], 0, 0
    beat_ns = 1_000_000_000 // SENDS_PER_S
    with path.open("wb") as file:
        for beat in range(1, shape.seconds * SENDS_PER_S + 1):
            frames = []
            while engine.clock.now_ns() + shape.step_ns <= beat * beat_ns:
                engine.fill()
                engine.core.step()
            for record in engine.kept.take():
                seq += 1
                frames.append(frame(seq, KIND_NAMES[type(record)], msgspec.json.encode(record)))
            data = b"".join(frames)
            file.write(data)
            sends.append(Send(beat * beat_ns, offset, len(data)))
            offset += len(data)
    return engine, sends
