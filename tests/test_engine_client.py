"""The moment between an engine's death and the server's knowledge of it.

GIVEN an engine that was killed while the event loop was busy, WHEN sequences are submitted and
aborted before the loop hears of it, THEN nothing is raised and each ends with the engine's error.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import zmq

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.spec import read_spec
from server.clock import Clock
from server.engine_client import EngineClient, Identity
from server.queue import Queue, QueueLimits
from server.sequence import Submission
from telemetry.bus import Bus
from tests import tiny

SUBMISSION = Submission(
    request_id="r", prompt=[1, 2, 3], max_tokens=500, sampling=SamplingParams(), received_at_ns=0
)


def client_of(model: Path, bus: Bus) -> EngineClient:
    clock = Clock.start()
    return EngineClient(
        config=EngineConfig(model=str(model), kv_blocks=64),
        identity=Identity(replica="r", model="tiny"),
        bus=bus,
        clock=clock,
        spec=read_spec(str(model)),
        queue=Queue(QueueLimits(requests_max=9, tokens_max=99), clock.now_ns),
    )


def kill_and_wait(client: EngineClient) -> None:
    """Kill the engine and hold the event loop until its socket has let go of it."""
    assert client.pid
    assert client._engine
    commands = client._engine.channels.commands
    os.kill(client.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while int(commands.getsockopt(zmq.EVENTS)) & int(zmq.POLLOUT):
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def ask_the_dead(client: EngineClient) -> list[str]:
    await client.start()
    try:
        await client.wait_settled()
        before = client.submit(SUBMISSION)
        kill_and_wait(client)
        after = client.submit(SUBMISSION)
        client.abort(before, finish="stop", delivered_tokens=0)
        for sequence in (before, after):
            await asyncio.wait_for(sequence.ended.wait(), 20)
        return [str(sequence.finish) for sequence in (before, after)]
    finally:
        await client.stop()


def test_a_sequence_submitted_to_an_engine_just_killed_ends_with_its_error(tmp_path: Path) -> None:
    bus = Bus(run_id="r", capacity=1000)
    client = client_of(tiny.write(tmp_path / "tiny"), bus)
    assert asyncio.run(ask_the_dead(client)) == ["error", "error"]
    assert bus.snapshot().live == []
