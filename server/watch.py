"""What a terminal knows of a running server: its run, its last step, its requests, what was lost.

Owns the fold of the live stream into that state; server/top_command.py feeds it and
server/top_picture.py reads it. It holds as many requests as the server has in flight, and windows
of fixed size beside them. Must never guess: after a loss it starts from the server's own hello.
"""

import time
from collections import Counter, deque

import msgspec

from server.event_stream import Event
from server.pace import Pace, Tile
from telemetry.records import (
    KINDS,
    SCHEMA_VERSION,
    Delivery,
    Fault,
    Iteration,
    Record,
    Rejection,
    RequestEnd,
    RequestStart,
    Run,
)

WATCHED_KINDS = (
    "run",
    "request_start",
    "iteration",
    "request_end",
    "delivery",
    "rejection",
    "fault",
)
NOTES_MAX = 3


class Hello(msgspec.Struct, frozen=True):
    """How the stream begins: the state at its place. `lost` is 0 or "unknown"."""

    run_id: str
    generation: int
    run: Run | None
    live: list[RequestStart]
    lost: int | str
    schema_version: int = SCHEMA_VERSION


class Lost(msgspec.Struct, frozen=True):
    """How many records this reader missed."""

    count: int


class Watched:
    """One request in flight, as far as iterations have told."""

    __slots__ = (
        "blocks",
        "computed",
        "gap_ns",
        "output",
        "phase",
        "preempted",
        "reached",
        "start",
        "token_at_ns",
    )

    def __init__(self, start: RequestStart) -> None:
        self.start = start
        self.phase: str | None = None  # None: it does not run
        self.preempted: str | None = None
        self.blocks = 0
        self.computed = 0
        self.reached = 0
        self.output = 0
        self.token_at_ns: int | None = None
        self.gap_ns: int | None = None


class Watch:
    """The state of one server, across restarts of its engine and of itself."""

    def __init__(self) -> None:
        self.run_id: str | None = None
        self.generation = 0
        self.run: Run | None = None
        self.notes: deque[tuple[float, str]] = deque(maxlen=NOTES_MAX)
        self.lost = 0
        self.engine_lost = 0
        self._server_unix_s: float | None = None
        self._forget()

    def _forget(self) -> None:
        """Begin with another life of the server."""
        self.requests: dict[int, Watched] = {}
        self.pace = Pace()
        self.last: Iteration | None = None
        self.phases: list[str] = []
        self.ended: Counter[str] = Counter()
        self.rejected = 0
        self.faults = 0
        self.preemptions = 0
        self._zero_ns: int | None = None  # this machine's clock at the server's zero, or later

    def now_ns(self, here_ns: int) -> int:
        """Return the server's instant at this machine's `here_ns`, at the least."""
        ends_ns = self.last.end_at_ns if self.last else 0
        return max(ends_ns, here_ns - self._zero_ns) if self._zero_ns is not None else ends_ns

    def opened(self, server_unix_s: float | None) -> None:
        """Take in that a stream is open, and what time it is there."""
        self._server_unix_s = server_unix_s

    def take(self, event: Event, here_ns: int) -> None:
        """Fold one event in; raises msgspec.DecodeError for one that is none of ours."""
        if event.name == "hello":
            self._hello(msgspec.json.decode(event.body, type=Hello), here_ns)
        elif event.name == "lost":
            count = msgspec.json.decode(event.body, type=Lost).count
            self.lost += count
            self.note(f"{count:,} records were lost on the way here")
        elif (kind := KINDS.get(event.name)) is not None:
            self._record(msgspec.json.decode(event.body, type=kind), here_ns)

    def note(self, text: str) -> None:
        """Keep a line for the reader, with the time."""
        self.notes.append((time.time(), text))

    # ---- events

    def _hello(self, hello: Hello, here_ns: int) -> None:
        if hello.schema_version != SCHEMA_VERSION:
            self.note(f"its records are of version {hello.schema_version}, not {SCHEMA_VERSION}")
        if self.run_id not in {None, hello.run_id}:
            self._forget()
            self.note(f"the server was started anew: run {hello.run_id}")
        elif hello.lost != 0:
            self.note("what happened in between is not known")
        self.run_id, self.generation, self.run = hello.run_id, hello.generation, hello.run
        known = self.requests
        self.requests = {
            start.request: known.get(start.request) or Watched(start) for start in hello.live
        }
        if hello.run is not None and self._server_unix_s is not None:
            self._sight(
                round(1e9 * self._server_unix_s) - 1000 * hello.run.started_unix_us, here_ns
            )

    def _record(self, record: Record, here_ns: int) -> None:
        if isinstance(record, Iteration):
            self._sight(record.end_at_ns, here_ns)
            self._iteration(record)
        elif isinstance(record, RequestStart):
            self._sight(record.arrived_at_ns, here_ns)
            self.requests[record.request] = Watched(record)
        elif isinstance(record, RequestEnd):
            self.requests.pop(record.request, None)
            self.ended[record.finish] += 1
        elif isinstance(record, Delivery):
            if record.first_write_at_ns is not None:
                self.pace.firsts_ns.append(record.first_write_at_ns - record.received_at_ns)
        elif isinstance(record, Run):
            self.run, self.generation = record, self.generation + 1
            if self.generation > 1:
                self.note(f"another engine was started: generation {self.generation}")
        elif isinstance(record, Rejection):
            self.rejected += 1
        elif isinstance(record, Fault):
            self.faults += 1
            self.note(f"fault in {record.where}: {record.error}")

    def _sight(self, at_ns: int, here_ns: int) -> None:
        """Take in that the server's clock was at least there: the later of all sights holds."""
        zero_ns = here_ns - at_ns
        self._zero_ns = zero_ns if self._zero_ns is None else min(self._zero_ns, zero_ns)

    def _iteration(self, step: Iteration) -> None:
        self.engine_lost += step.lost_before
        if step.lost_before:
            self.note(f"the engine dropped {step.lost_before:,} iterations unsent")
        for request in step.admitted:
            if request in self.requests:
                self.requests[request].phase = "admitted"
        outputs = self._rows(step)
        for request, cause in zip(step.preempted, step.preempted_causes, strict=True):
            self.preemptions += 1
            if (watched := self.requests.get(request)) is not None:
                watched.phase, watched.preempted, watched.blocks = None, cause, 0
        self.last = step
        self.pace.add(
            Tile(
                begin_at_ns=step.begin_at_ns,
                end_at_ns=step.end_at_ns,
                prefill_tokens=step.prefill_tokens,
                output_tokens=outputs,
            )
        )

    def _rows(self, step: Iteration) -> int:
        """Take in the batch row by row; return how many tokens were sampled."""
        outputs = 0
        self.phases = []
        rows = zip(
            step.requests,
            step.start_positions,
            step.token_counts,
            step.kv_block_counts,
            strict=True,
        )
        for request, start, count, blocks in rows:
            watched = self.requests.get(request)
            if watched is None:
                self.phases.append("unknown")
                continue
            outputs += self._row(watched, start, start + count, step.end_at_ns)
            watched.blocks = blocks
            self.phases.append(watched.phase or "unknown")
        return outputs

    def _row(self, watched: Watched, start: int, end: int, at_ns: int) -> int:
        """Take in positions computed; a new token is one beyond everything computed before."""
        prompt = watched.start.prompt_tokens
        if start < watched.reached:
            watched.phase = "recompute"
        else:
            watched.phase = "prefill" if start < prompt else "decode"
        watched.computed, watched.reached = end, max(watched.reached, end)
        output = watched.reached - prompt + 1
        if output <= watched.output:
            return 0
        new = output - watched.output
        if watched.token_at_ns is not None and new == 1:
            watched.gap_ns = at_ns - watched.token_at_ns
            self.pace.gaps_ns.append(watched.gap_ns)
        watched.output, watched.token_at_ns = output, at_ns
        # One that was joined midway has its earlier tokens counted as one.
        return 1
