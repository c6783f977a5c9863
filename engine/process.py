"""The engine as a process: its sockets, its start, its last words.

Owns what a spawned engine is told (EngineStart) and the process's main. server/engine_process.py
spawns it; tests run `run_engine` in a thread. Importing this module must not import torch, since
the server does so to spawn it.
"""

import gc
import shutil
import signal
import traceback
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from threading import Event

import zmq

from engine.config import ConfigError, EngineConfig
from engine.loop import Loop, MonotonicClock, Outbox
from engine.messages import Failed, Ready
from engine.spec import SpecError
from telemetry.records import Fault

RECORDS_QUEUE = 1024
CONTROL_QUEUE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What a new engine is told: its settings, its three addresses, and the zero of time.

    folder: where the sockets are; the engine removes it when it outlives its server.
    sentinel: a file descriptor that becomes readable when the server is gone, or None.
    """

    config: EngineConfig
    commands_address: str
    control_address: str
    records_address: str
    zero_ns: int
    folder: str | None = None
    sentinel: int | None = None


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
    # Imported here: the server imports this module to spawn it, and must stay free of torch.
    from engine.build import build  # noqa: PLC0415

    clock = MonotonicClock(start.zero_ns)
    try:
        core, run = build(start.config, emit=outbox, clock=clock, progress=outbox.progress)
        # What the start has made stays for good: the collector need not walk it at every pass.
        gc.collect()
        gc.freeze()
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
    if start.folder and not parent.is_alive():
        shutil.rmtree(start.folder, ignore_errors=True)
