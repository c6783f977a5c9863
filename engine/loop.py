"""The engine's loop: commands in, one iteration after another, records out; a process of its own.

Owns the two channels to the server. *Control* never drops: unsent news merge per request until the
server takes them. *Records* may drop, and each iteration says how many were lost before it. The
engine never waits for anyone but new work. `run_engine` is the process's main; tests run it in a
thread. Must leave when the server is gone: a sentinel file descriptor tells.
"""

import signal
import traceback
from dataclasses import asdict, dataclass, replace
from multiprocessing import parent_process
from threading import Event
from time import monotonic_ns

import msgspec
import zmq

from engine.config import ConfigError, EngineConfig, resolve
from engine.core import Core
from engine.kv import KVPool
from engine.messages import (
    Abort,
    Command,
    Delta,
    Failed,
    News,
    Progress,
    Ready,
    Report,
    Shutdown,
    Submit,
)
from engine.policies import POLICIES
from engine.runner import ModelRunner, device_facts
from engine.scheduler import Scheduler
from engine.spec import ModelSpec, SpecError, read_spec
from telemetry.records import SCHEMA_VERSION, Fault, Iteration, RequestEnd, RequestStart, Run

RECORDS_QUEUE = 1024
CONTROL_QUEUE = 64
RETRY_MS = 20
IDLE_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What a new engine is told: its settings, its three addresses, and the zero of time.

    sentinel: a file descriptor that becomes readable when the server is gone, or None.
    """

    config: EngineConfig
    commands_address: str
    control_address: str
    records_address: str
    zero_ns: int
    sentinel: int | None = None


class MonotonicClock:
    """Nanoseconds since the server's start."""

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns

    def now_ns(self) -> int:
        """Return the present instant."""
        return monotonic_ns() - self._zero_ns


class Outbox:
    """The engine's side of both channels; implements core's Emit.

    Unsent news are bounded by the live requests and, for each, by its max_tokens.
    """

    def __init__(self, control: "zmq.Socket[bytes]", records: "zmq.Socket[bytes]") -> None:
        self.lost = 0
        self._control = control
        self._records = records
        self._encode_news = msgspec.msgpack.Encoder().encode
        self._encode_record = msgspec.json.Encoder().encode
        self._after_step = 0
        self._lost_through = 0
        self._deltas: dict[int, Delta] = {}
        self._starts: list[RequestStart] = []
        self._ends: list[RequestEnd] = []
        self._faults: list[Fault] = []

    @property
    def unsent(self) -> bool:
        """Whether news wait for the server to take them."""
        return bool(self._starts or self._deltas or self._ends or self._faults)

    def tell(self, news: News) -> None:
        """Send start-up news; these may wait, nothing runs yet."""
        self._control.send(self._encode_news(news))

    def start(self, record: RequestStart) -> None:
        """Report a sequence that entered the queue."""
        self._starts.append(record)

    def fault(self, record: Fault) -> None:
        """Report something that broke."""
        self._faults.append(record)

    def step(self, deltas: list[Delta], iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Send a step's news: tokens first, since clients wait for them, then its record."""
        self._after_step = iteration.step
        for delta in deltas:
            earlier = self._deltas.get(delta.request)
            self._deltas[delta.request] = merge(earlier, delta) if earlier else delta
        self._ends.extend(ends)
        try:
            self._records.send(self._encode_record(iteration), zmq.DONTWAIT)
            self.lost = 0
        except zmq.Again:
            self.lost += 1
            self._lost_through = iteration.step
        self.flush()

    def flush(self) -> None:
        """Offer everything unsent as one report; it stays here if the server does not take it."""
        if not self.unsent:
            return
        report = Report(
            after_step=self._after_step,
            lost_through_step=self._lost_through,
            deltas=list(self._deltas.values()),
            starts=self._starts,
            ends=self._ends,
            faults=self._faults,
        )
        try:
            self._control.send(self._encode_news(report), zmq.DONTWAIT)
        except zmq.Again:
            return
        self._deltas, self._starts, self._ends, self._faults = {}, [], [], []


def merge(earlier: Delta, later: Delta) -> Delta:
    """Return one delta that says what two of the same request said."""
    tokens = earlier.tokens + later.tokens
    return Delta(later.request, tokens, later.finish, later.error)


class Loop:
    """Runs a core over an inbox until it is told to stop or the server is gone."""

    def __init__(
        self,
        *,
        core: Core,
        inbox: "zmq.Socket[bytes]",
        outbox: Outbox,
        sentinel: int | None = None,
        stop: Event | None = None,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._sentinel = sentinel
        self._stop = stop or Event()
        self._decode: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        if sentinel is not None:
            self._poller.register(sentinel, zmq.POLLIN)

    def run(self) -> None:
        """Step while there is work, sleep while there is none."""
        while not self._stop.is_set():
            if self._core.has_work:
                self._drain_inbox(timeout_ms=0)
                # Arrivals go out before the step that may admit them, so that they are told first.
                self._outbox.flush()
                self._core.step()
                continue
            self._outbox.flush()
            self._drain_inbox(timeout_ms=RETRY_MS if self._outbox.unsent else IDLE_MS)
            self._core.wake()
            self._outbox.flush()
        self._leave()

    def _drain_inbox(self, *, timeout_ms: int) -> None:
        """Take in every command that has arrived; wait for the first at most timeout_ms."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._sentinel in ready:
            self._stop.set()
        if self._inbox not in ready:
            return
        while True:
            try:
                message = self._inbox.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            match self._decode.decode(message):
                case Submit() as submit:
                    self._core.add(submit)
                case Abort() as abort:
                    self._core.abort(abort)
                case Shutdown():
                    self._stop.set()

    def _leave(self) -> None:
        """End what still lives, on record, and let the last news go out."""
        for number in list(self._core.scheduler.requests):
            self._core.abort(Abort(request=number, finish="cancelled", cancel_cause="shutdown"))
        if self._core.has_work:
            self._core.step()
        self._outbox.flush()


def run_engine(start: EngineStart, stop: Event | None = None) -> None:
    """Serve until told to stop: load the model, warm up, say ready, loop.

    A start that cannot succeed is told in one line (Failed). An error of our own in the loop is
    reported as a Fault and ends the process; the server starts another engine.
    """
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVHWM, 0)
    control = context.socket(zmq.PUSH)
    control.setsockopt(zmq.SNDHWM, CONTROL_QUEUE)
    records = context.socket(zmq.PUSH)
    records.setsockopt(zmq.SNDHWM, RECORDS_QUEUE)
    for socket, address in (
        (inbox, start.commands_address),
        (control, start.control_address),
        (records, start.records_address),
    ):
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
    outbox = Outbox(control, records)
    clock = MonotonicClock(start.zero_ns)
    try:
        core, run = build(start.config, outbox, clock)
        outbox.tell(Ready(run=run))
        core.wake()
        loop = Loop(core=core, inbox=inbox, outbox=outbox, sentinel=start.sentinel, stop=stop)
        loop.run()
    except (SpecError, ConfigError) as error:
        outbox.tell(Failed(error=str(error)))
    except Exception as error:
        outbox.fault(_fault(error, clock.now_ns()))
        outbox.flush()
        raise
    finally:
        context.destroy(linger=1000)


def build(config: EngineConfig, outbox: Outbox, clock: MonotonicClock) -> tuple[Core, Run]:
    """Load the model and return a warm core with the record of its effective limits."""

    def progress(stage: str, fraction: float) -> None:
        outbox.tell(Progress(stage=stage, fraction=fraction))

    progress("reading the model's header", 0.0)
    spec = read_spec(config.model)
    resolved = resolve(config, spec, device_facts(config))
    runner = ModelRunner.build(resolved, spec, progress)
    runner.warm_up(progress)
    assert resolved.kv_blocks is not None
    pool = KVPool(blocks=resolved.kv_blocks, block_tokens=resolved.block_size)
    policy = POLICIES[resolved.scheduling_policy]()
    scheduler = Scheduler(config=resolved, pool=pool, policy=policy, eos_ids=spec.eos_ids)
    core = Core(scheduler=scheduler, runner=runner, clock=clock, emit=outbox)
    return core, _run_record(resolved, spec, runner)


def _run_record(config: EngineConfig, spec: ModelSpec, runner: ModelRunner) -> Run:
    """Return the engine's part of Run; the server adds replica, names, revision and wall clock."""
    assert config.kv_blocks is not None
    assert config.max_model_len is not None
    settings = replace(config, attention_backend=runner.backend)
    return Run(
        replica="",
        schema_version=SCHEMA_VERSION,
        started_unix_us=0,
        model=config.model,
        parameters=spec.parameters,
        dtype=config.dtype,
        device=config.device,
        backend=runner.backend,
        backend_refusals=msgspec.json.encode(runner.refusals).decode(),
        policy=config.scheduling_policy,
        batching=config.batching,
        kv_blocks_total=config.kv_blocks,
        block_tokens=config.block_size,
        batch_tokens_max=config.max_num_batched_tokens,
        seqs_max=config.max_num_seqs,
        model_len_max=config.max_model_len,
        buckets=list(config.buckets),
        config=msgspec.json.encode(asdict(settings)).decode(),
        revision="",
    )


def _fault(error: Exception, now_ns: int) -> Fault:
    return Fault(
        fault_at_ns=now_ns,
        step=None,
        where="engine loop",
        error=f"{type(error).__name__}: {error}".splitlines()[0],
        traceback="".join(traceback.format_exception(error)),
    )


def engine_process(start: EngineStart) -> None:
    """Be the engine process: ignore Ctrl-C, which the server answers by draining."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "an engine process has a server as its parent"
    run_engine(replace(start, sentinel=parent.sentinel))
