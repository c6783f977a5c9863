"""The engine's loop: commands in, one iteration after another, records out.

Owns the engine's side of the two channels to the server. *Control* never drops: unsent news merge
per request until the server takes them. *Records* may drop, and each iteration says how many were
lost before it. engine/process.py runs it. Never waits for anyone but new work, and leaves when the
server is gone: a sentinel file descriptor tells.
"""

from collections.abc import Callable
from threading import Event
from time import monotonic_ns, sleep

import msgspec
import zmq

from engine.core import Core
from engine.messages import (
    Abort,
    Command,
    Delta,
    Gains,
    News,
    Progress,
    Report,
    Shutdown,
    Submit,
    Trouble,
    joined,
)
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart, StepModel

RETRY_MS = 20
IDLE_MS = 1000
LEAVE_NS = 1_000_000_000


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
        self._gains: Gains | None = None  # of the last step, while nothing older is unsent
        self._deltas: dict[int, Delta] = {}
        self._starts: list[RequestStart] = []
        self._ends: list[RequestEnd] = []
        self._faults: list[Fault] = []
        self._step_models: list[StepModel] = []

    @property
    def unsent(self) -> bool:
        """Whether news wait for the server to take them."""
        records = (self._starts, self._ends, self._faults, self._step_models)
        return any(records) or self._gains is not None or bool(self._deltas)

    def tell(self, news: News) -> None:
        """Send start-up news; these may wait, nothing runs yet."""
        self._control.send(self._encode_news(news))

    def progress(self, stage: str, fraction: float) -> None:
        """Tell people what the engine is doing before it is ready."""
        trouble = isinstance(stage, Trouble)
        self.tell(Progress(stage=str(stage), fraction=fraction, trouble=trouble))

    def start(self, record: RequestStart) -> None:
        """Report a sequence that entered the queue."""
        self._starts.append(record)

    def fault(self, record: Fault) -> None:
        """Report something that broke."""
        self._faults.append(record)

    def step_model(self, record: StepModel) -> None:
        """Report a new fit."""
        self._step_models.append(record)

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Send a step's news: tokens first, since clients wait for them, then its record."""
        self._after_step = iteration.step
        self._gain(gains)
        self._ends.extend(ends)
        try:
            self._records.send(self._encode_record(iteration), zmq.DONTWAIT)
            self.lost = 0
        except zmq.Again:
            self.lost += 1
            self._lost_through = iteration.step
        self.flush()

    def _gain(self, gains: Gains) -> None:
        """Keep a step's gains as they are; those that were not taken merge, by request."""
        if self._gains is None and not self._deltas:
            self._gains = gains
            return
        for earlier in (self._gains or Gains(), gains):
            for delta in earlier.each():
                known = self._deltas.get(delta.request)
                self._deltas[delta.request] = merge(known, delta) if known else delta
        self._gains = None

    def flush(self) -> None:
        """Offer everything unsent as one report; it stays here if the server does not take it."""
        if not self.unsent:
            return
        report = Report(
            after_step=self._after_step,
            lost_through_step=self._lost_through,
            gains=self._gains or Gains(deltas=list(self._deltas.values())),
            starts=self._starts,
            ends=self._ends,
            faults=self._faults,
            step_models=self._step_models,
        )
        try:
            self._control.send(self._encode_news(report), zmq.DONTWAIT)
        except zmq.Again:
            return
        self._gains, self._deltas = None, {}
        self._starts, self._ends = [], []
        self._faults, self._step_models = [], []


def merge(earlier: Delta, later: Delta) -> Delta:
    """Return one delta that says what two of the same request said."""
    tokens = earlier.tokens + later.tokens
    return Delta(
        later.request,
        tokens,
        later.finish,
        later.error,
        joined(earlier.logprobs, later.logprobs),
        joined(earlier.prompt_logprobs, later.prompt_logprobs),
        earlier.cached_tokens + later.cached_tokens,
    )


class Loop:
    """Runs a core over an inbox until it is told to stop or the server is gone.

    beat is called while a batch waits for company, which takes time and is no hang.
    """

    def __init__(
        self,
        *,
        core: Core,
        inbox: "zmq.Socket[bytes]",
        outbox: Outbox,
        sentinel: int | None = None,
        stop: Event | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
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
            if delay_ns := self._core.opens_in_ns():
                self._beat()
                self._outbox.flush()
                self._drain_inbox(timeout_ms=min(IDLE_MS, 1 + delay_ns // 1_000_000))
                self._core.rest()
                continue
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
        """End what still lives, on record, and let the last news go out, a second at most."""
        for number in list(self._core.scheduler.roster.requests):
            self._core.abort(Abort(request=number, finish="cancelled", cancel_cause="shutdown"))
        if self._core.has_work:
            self._core.step()
        deadline_ns = monotonic_ns() + LEAVE_NS
        self._outbox.flush()
        while self._outbox.unsent and monotonic_ns() < deadline_ns:
            sleep(RETRY_MS / 1000)
            self._outbox.flush()
