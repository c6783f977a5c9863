"""The engine's loop over real sockets, in a thread: nothing reliable is lost, loss is counted."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from engine.loop import Loop, Outbox
from engine.messages import Abort, Command, News, Report, SamplingParams, Shutdown, Submit
from telemetry.records import Iteration, RequestEnd
from tests.simulation import Simulation, token_of

DEADLINE_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


@dataclass
class Far:
    """The server's side of one loop, reading only when told to."""

    commands: "zmq.Socket[bytes]"
    control: "zmq.Socket[bytes]"
    records: "zmq.Socket[bytes]"
    thread: threading.Thread
    simulation: Simulation
    news: list[News] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)

    def command(self, command: Command) -> None:
        self.commands.send(msgspec.msgpack.encode(command))

    def submit(self, number: int, prompt_tokens: int, max_tokens: int) -> None:
        prompt = [token_of(number, -1 - i) for i in range(prompt_tokens)]
        self.simulation.runner.prompts[number] = prompt
        self.command(
            Submit(
                request=number,
                request_id=f"req-{number}",
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=0.0),
                received_at_ns=0,
            )
        )

    def read(self) -> None:
        for socket, decode, store in (
            (self.control, msgspec.msgpack.Decoder(News).decode, self.news),
            (self.records, msgspec.json.Decoder(Iteration).decode, self.iterations),
        ):
            while socket.poll(0):
                store.append(decode(socket.recv()))  # type: ignore[attr-defined]

    def ends(self) -> list[RequestEnd]:
        self.read()
        return [end for report in self.news if isinstance(report, Report) for end in report.ends]


@contextmanager
def far_side(folder: Path, *, queue: int) -> Iterator[Far]:
    context = zmq.Context()
    addresses = [f"ipc://{folder / name}" for name in ("commands", "control", "records")]
    kinds = (zmq.PUSH, zmq.PULL, zmq.PULL)
    ends = [context.socket(kind) for kind in kinds]
    for socket, address in zip(ends, addresses, strict=True):
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.bind(address)
    near = [context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH)]
    for socket, address in zip(near, addresses, strict=True):
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.connect(address)
    outbox = Outbox(near[1], near[2])
    simulation = Simulation(emit=outbox)
    loop = Loop(core=simulation.core, inbox=near[0], outbox=outbox)
    thread = threading.Thread(target=loop.run)
    far = Far(ends[0], ends[1], ends[2], thread, simulation)
    thread.start()
    try:
        yield far
    finally:
        far.command(Shutdown())
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        for socket in (*ends, *near):
            socket.close(linger=0)
        context.term()


def test_tokens_starts_and_ends_arrive(tmp_path: Path) -> None:
    with far_side(tmp_path, queue=100) as far:
        far.submit(1, 10, 5)
        far.submit(2, 4, 3)
        wait_until(lambda: len(far.ends()) == 2)
        far.read()
        tokens: dict[int, list[int]] = {1: [], 2: []}
        for report in far.news:
            assert isinstance(report, Report)
            for delta in report.gains.each():
                tokens[delta.request].extend(delta.tokens)
        assert tokens == {
            1: [token_of(1, index) for index in range(5)],
            2: [token_of(2, index) for index in range(3)],
        }
        assert [record.step for record in far.iterations] == list(range(1, len(far.iterations) + 1))


def test_a_server_that_does_not_read_loses_records_but_no_news(tmp_path: Path) -> None:
    """Every token and every end arrives, merged; lost_before counts each missing iteration."""
    with far_side(tmp_path, queue=1) as far:

        def ended(count: int) -> None:
            wait_until(lambda: len(far.ends()) == count)

        for number in range(1, 41):
            far.submit(number, 8, 60)
        wait_until(lambda: not far.simulation.core.has_work and far.simulation.core.steps > 500)
        steps = far.simulation.core.steps
        ended(40)
        more = 0
        # Even a record after the jam may be refused, until the sockets know that there is room.
        while not any(record.step > steps for record in far.iterations):
            more += 1
            far.submit(99 + more, 2, 1)
            ended(40 + more)
        total = sum(
            len(delta.tokens)
            for report in far.news
            if isinstance(report, Report)
            for delta in report.gains.each()
        )
        assert total == 40 * 60 + more
        received = [record for record in far.iterations if record.step <= steps]
        assert len(received) < steps, "nothing was lost: the test shows nothing"
        after = next(record for record in far.iterations if record.step > steps)
        lost = sum(record.lost_before for record in received) + after.lost_before
        assert len(received) + lost == after.step - 1  # a record after the jam may be lost too


def test_shutdown_ends_what_runs(tmp_path: Path) -> None:
    with far_side(tmp_path, queue=100) as far:
        far.submit(1, 10, 10_000 - 9_900)
        far.command(Abort(request=7, finish="cancelled"))
        far.command(Shutdown())
        wait_until(lambda: len(far.ends()) == 1)
        (end,) = far.ends()
        assert end.finish in ("cancelled", "length")
        assert end.finish == "length" or end.cancel_cause == "shutdown"
