"""The server's side of the engine: submit, abort, take tokens; and start it again when it dies.

Owns the live sequences' mailboxes, the integers that name sequences, and the engine's state. Runs
on the event loop alone; API handlers call it. Must never block the loop, never drop a delta, and
never leave a started sequence without its one end on record, whatever happens to the engine.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Literal

import msgspec
import zmq

from engine.config import EngineConfig
from engine.messages import (
    Abort,
    Delta,
    Failed,
    Gains,
    News,
    Progress,
    Ready,
    Report,
    Shutdown,
    Submit,
)
from engine.spec import ModelSpec
from server.clock import Clock
from server.engine_process import Channel, EngineProcess, Take, read_some
from server.lost import iterations_held, last_seen, lost_end, refusal, witnesses
from server.publication import Publication
from server.queue import Asked, Queue, Waiting
from server.sequence import Sequence, Submission
from telemetry.bus import Bus
from telemetry.records import (
    CancelCause,
    Fault,
    Iteration,
    Record,
    RequestEnd,
    Run,
)

State = Literal["loading", "ready", "down"]
RESTART_S_MAX = 30.0
STEADY_NS = 60_000_000_000
"""An engine that served so long has not died of its start: the next one may follow at once."""
STARTS_MAX = 3
"""Engines that may die before one was ever ready; then it is the model or the machine."""


class EngineDown(Exception):
    """No engine can take a request now."""


class EngineFailed(Exception):
    """The engine cannot start: one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The server's part of a Run: who serves, under which model name."""

    replica: str
    model: str


class EngineClient:
    """One engine at a time, in its own process; generations follow one another."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        identity: Identity,
        bus: Bus,
        clock: Clock,
        spec: ModelSpec,
        queue: Queue,
    ) -> None:
        self.state: State = "loading"
        self.progress: Progress | None = None
        self.run: Run | None = None
        self.spec = spec
        self.queue = queue
        self._running = 0
        self.failure: str | None = None
        self._ready_at_ns = 0
        self._config = config
        self.identity = identity
        self._bus = bus
        self._clock = clock
        self._log = logging.getLogger("iterscope.engine")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)
        self._decode_iteration = msgspec.json.Decoder(Iteration)
        self._live: dict[int, Sequence] = {}
        self._next_request = 1
        self._engine: EngineProcess | None = None
        self._publication = Publication(self._publish)
        self._settled = asyncio.Event()
        self._restart: asyncio.TimerHandle | None = None
        self._deaths_in_a_row = 0
        self._stopping = False

    # ---- life of an engine

    async def start(self) -> None:
        """Spawn the first engine; `wait_settled` tells when it serves or has failed."""
        self._spawn()

    async def wait_settled(self) -> None:
        """Wait until an engine is ready; raise EngineFailed if it cannot start."""
        await self._settled.wait()
        if self.failure is not None:
            raise EngineFailed(self.failure)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the engine; what still runs ends as cancelled (shutdown), on record."""
        self._stopping = True
        if self._restart:
            self._restart.cancel()
        if self._engine is not None:
            await self._leave(self._engine, grace_s)
        self._context.destroy(linger=0)

    async def _leave(self, engine: EngineProcess, grace_s: float) -> None:
        with contextlib.suppress(zmq.Again):  # an engine that has not connected yet cannot be told
            engine.channels.commands.send(self._encode(Shutdown()), zmq.DONTWAIT)
        deadline = self._clock.now_ns() + int(grace_s * 1e9)
        while self._engine is not None and self._clock.now_ns() < deadline:
            await asyncio.sleep(0.01)
        if self._engine is not None:
            self._bury()

    @property
    def pid(self) -> int | None:
        """The engine's process id, None while there is none."""
        return self._engine.pid if self._engine else None

    @property
    def pulse(self) -> tuple[int, int] | None:
        """What moves while the engine progresses; None while none is due: it is idle, or gone."""
        engine = self._engine
        if engine is None or (self.state == "ready" and not self._live):
            return None
        return self.pid or 0, engine.pulse.read()

    async def end_hung(self, pulse: tuple[int, int], stalled_s: float) -> None:
        """End an engine whose pulse stands still: its stacks go on record, another follows."""
        engine = self._engine
        if engine is None or self._stopping:
            return
        activity, stacks = engine.activity(), await engine.ask_stacks()
        if engine is self._engine and self.pulse == pulse:
            self._bury(f"hung: no progress for {stalled_s:.0f} s, {activity}", stacks)

    def _spawn(self) -> None:
        self.state = "loading"
        self.progress = None
        try:
            engine = self._started()
        except (OSError, zmq.ZMQError) as error:
            # The machine has nothing left to start it with, file descriptors for one: try again.
            self.state = "down"
            self._fault(f"the engine could not be started ({error})")
            self._deaths_in_a_row += 1
            self._start_later(f"could not be started ({error})")
            return
        self._engine = engine
        self._publication = Publication(self._publish)
        loop = asyncio.get_running_loop()
        for socket, take in self._channels(engine):
            loop.add_reader(socket.FD, self._drain, socket, take)
        loop.add_reader(engine.sentinel, self._bury)

    def _started(self) -> EngineProcess:
        """Return a running engine process; OSError or ZMQError leave nothing behind."""
        engine = EngineProcess(self._context, self._config)
        try:
            engine.start(self._clock.zero_ns)
        except OSError:
            engine.close()
            raise
        return engine

    def _start_later(self, why: str) -> None:
        """Start another engine after a delay that doubles with each death in a row."""
        delay_s = min(RESTART_S_MAX, 2.0 ** (self._deaths_in_a_row - 1) - 1)
        self._log.error("the engine %s; starting another in %.0f s", why, delay_s)
        self._restart = asyncio.get_running_loop().call_later(delay_s, self._spawn)

    def _bury(self, hung: str | None = None, stacks: str = "") -> None:
        """Take in what a dead engine still said, end what it left open, and start another."""
        engine = self._engine
        if engine is None:
            return
        exit_told = engine.end(0.0)
        ended, stacks = hung or f"died ({exit_told})", stacks or engine.stacks()
        loop = asyncio.get_running_loop()
        for socket, take in self._channels(engine):
            while read_some(socket, take):
                pass
            loop.remove_reader(socket.FD)
        loop.remove_reader(engine.sentinel)
        self._publication.close()
        was_ready, self.state, self._engine = self.state == "ready", "down", None
        engine.close()
        seen = last_seen(iterations_held(self._bus), self._live.values(), self._clock.now_ns())
        self._close_sequences(f"the engine {ended}")
        if self._stopping:
            return
        if self.failure is None:
            self._fault(f"the engine {ended}", f"{stacks}\n{seen}")
        steady = was_ready and self._clock.now_ns() - self._ready_at_ns > STEADY_NS
        self._deaths_in_a_row = 1 if steady else self._deaths_in_a_row + 1
        if self.run is None and self._deaths_in_a_row >= STARTS_MAX:
            self.failure = self.failure or f"{STARTS_MAX} engines in a row {ended}, none was ready"
        if self.run is None and self.failure is not None:
            self._settled.set()
        else:
            self._start_later(self.failure or ended)

    def _close_sequences(self, error: str) -> None:
        """Give every open sequence its error, and its end or its refusal on record."""
        now = self._clock.now_ns()
        started = {start.request: start for start in self._bus.snapshot().live}
        for number, sequence in list(self._live.items()):
            sequence.put(Delta(number, [], "error", error))
            if number not in started:
                self._publish(refusal(sequence.submission, now), None)
                sequence.ended.set()
        seen = witnesses(started, iterations_held(self._bus))
        for number, start in started.items():
            sequence_or_none = self._live.get(number)
            end = lost_end(start, sequence_or_none, seen[number], error=error, now_ns=now)
            self._publish(end, None)
        self._live.clear()
        self.queue.clear()
        self._running = 0

    # ---- requests

    def check_queue(self, *, sequences: int, tokens: int, tenant: str) -> None:
        """Raise QueueFull unless so many sequences with so many prompt tokens may join."""
        slots = self.run.seqs_max if self.run else 0
        self.queue.check(
            Asked(sequences=sequences, tokens=tokens, tenant=tenant),
            slots=slots,
            slots_free=slots - self._running,
        )

    def submit(self, submission: Submission) -> Sequence:
        """Hand a sequence to the engine; EngineDown when there is none to take it."""
        if self.state != "ready" or self._engine is None:
            raise EngineDown
        number = self._next_request
        self._next_request += 1
        sequence = Sequence(number, submission)
        self._live[number] = sequence
        self.queue.joined(
            number,
            Waiting(submission.tenant, len(submission.prompt), submission.max_tokens),
        )
        self._command(
            Submit(
                request=number,
                request_id=submission.request_id,
                external_id=submission.external_id,
                parent_id=submission.parent_id,
                tenant=submission.tenant,
                prompt=submission.prompt,
                max_tokens=submission.max_tokens,
                sampling=submission.sampling,
                priority=submission.priority,
                slo=submission.slo,
                stream=submission.stream,
                cache_salt=submission.cache_salt,
                received_at_ns=submission.received_at_ns,
            )
        )
        return sequence

    def abort(
        self,
        sequence: Sequence,
        *,
        finish: Literal["stop", "cancelled", "error"],
        cancel_cause: CancelCause | None = None,
        error: str | None = None,
        delivered_tokens: int,
    ) -> None:
        """End a sequence early; a second abort, or one after its finish, does nothing."""
        if sequence.aborted or sequence.finish is not None or self._engine is None:
            return
        sequence.aborted = True
        self._command(
            Abort(
                request=sequence.request,
                finish=finish,
                cancel_cause=cancel_cause,
                error=error,
                delivered_tokens=delivered_tokens,
            )
        )

    def live(self) -> list[Sequence]:
        """Return the sequences that have not finished."""
        return [sequence for sequence in self._live.values() if sequence.finish is None]

    def _command(self, command: Submit | Abort) -> None:
        assert self._engine is not None
        # Its socket lets go of an engine that died a moment before its sentinel says so: then
        # `_bury` is due, and ends this sequence with all the others.
        with contextlib.suppress(zmq.Again):
            self._engine.channels.commands.send(self._encode(command), zmq.DONTWAIT)

    # ---- news

    def _channels(self, engine: EngineProcess) -> tuple[tuple[Channel, Take], ...]:
        channels = engine.channels
        return (channels.control, self._take_news), (channels.records, self._take_record)

    def _drain(self, socket: Channel, take: Take) -> None:
        """Read one channel; ZeroMQ's descriptors tell of edges, so nothing may be left."""
        if not socket.closed and read_some(socket, take):
            asyncio.get_running_loop().call_soon(self._drain, socket, take)

    def _take_news(self, message: bytes) -> None:
        match self._decode_news.decode(message):
            case Report() as report:
                self._deliver(report.gains)
                self._publication.report(report)
            case Progress() as progress:
                if self.progress is None or progress.stage != self.progress.stage:
                    level = logging.WARNING if progress.trouble else logging.INFO
                    self._log.log(level, "loading: %s", progress.stage)
                self.progress = progress
            case Ready() as ready:
                self._ready(ready.run)
            case Failed() as failed:
                self.failure = failed.error

    def _deliver(self, gains: Gains) -> None:
        for request, token in zip(gains.requests, gains.tokens, strict=True):
            if sequence := self._live.get(request):
                sequence.put_token(token)
        for delta in gains.deltas:
            if sequence := self._live.get(delta.request):
                sequence.put(delta)

    def _take_record(self, payload: bytes) -> None:
        self._publication.iteration(self._decode_iteration.decode(payload), payload)

    def _ready(self, run: Run) -> None:
        self.run = replace(
            run,
            replica=self.identity.replica,
            model=self.identity.model,
            started_unix_us=self._clock.started_unix_us,
            revision=version("iterscope"),
        )
        self.failure = None
        self.state = "ready"
        self._ready_at_ns = self._clock.now_ns()
        self._publish(self.run, None)
        self._settled.set()

    def _publish(self, record: Record, payload: bytes | None) -> None:
        if isinstance(record, Iteration):
            self._running = record.running
            self.queue.stepped(record)
        elif isinstance(record, RequestEnd):
            if sequence := self._live.pop(record.request, None):
                sequence.ended.set()
            self.queue.ended(record.request, record.output_tokens, record.finish)
        self._bus.publish(record, payload)

    def _fault(self, error: str, stacks: str = "") -> None:
        self._publish(
            Fault(
                fault_at_ns=self._clock.now_ns(),
                step=None,
                where="engine process",
                error=error,
                traceback=stacks,
            ),
            None,
        )
