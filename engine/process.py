"""The engine as a process: its sockets, its start, its last words.

Owns what a spawned engine is told (EngineStart) and the process's main. server/engine_process.py
spawns it; tests run `run_engine` in a thread. Importing this module must not import torch, since
the server does so to spawn it.
"""

import gc
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from pathlib import Path
from threading import Event

import zmq

from engine.config import ConfigError, EngineConfig
from engine.core import Core
from engine.faults import fault_of, kind_of, line_of
from engine.loop import Loop, MonotonicClock, Outbox
from engine.messages import Failed, Ready
from engine.spec import SpecError
from engine.vitals import Pulse, stacks_on_demand
from telemetry.records import Run

RECORDS_QUEUE = 1024
CONTROL_QUEUE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What a new engine is told: its settings, its three addresses, and the zero of time.

    folder: where the sockets and signs of life are; an engine that outlives its server removes it.
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

    A start that cannot succeed is told in one line (Failed). An error of our own in the loop, or
    a lost device, is reported as a Fault and ends the process; the server starts another engine.
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
    beat = Pulse(Path(start.folder)).beat if start.folder else _nothing
    try:
        built = _built(start.config, outbox, clock, beat)
        if built is None:
            return
        core, run = built
        # What the start has made stays for good: the collector need not walk it at every pass.
        gc.collect()
        gc.freeze()
        outbox.tell(Ready(run=run))
        core.wake()
        Loop(
            core=core, inbox=inbox, outbox=outbox, sentinel=start.sentinel, stop=stop, beat=beat
        ).run()
    except Exception as error:
        outbox.fault(fault_of(error, where="engine loop", now_ns=clock.now_ns()))
        outbox.flush()
        raise
    finally:
        context.destroy(linger=1000)


def _nothing() -> None:
    """Beat for nobody."""


def _built(
    config: EngineConfig, outbox: Outbox, clock: MonotonicClock, beat: Callable[[], None]
) -> tuple[Core, Run] | None:
    """Return the warm core and its limits, or tell why there is none and return None."""

    def progress(stage: str, fraction: float) -> None:
        beat()
        outbox.progress(stage, fraction)

    try:
        # Imported here: the server imports this module to spawn it, and must stay free of torch.
        from engine.build import build  # noqa: PLC0415

        return build(config, emit=outbox, clock=clock, progress=progress, beat=beat)
    except (SpecError, ConfigError) as error:
        outbox.tell(Failed(error=str(error)))
    except Exception as error:  # noqa: BLE001  whatever it is, people get one line
        outbox.fault(fault_of(error, where="engine start", now_ns=clock.now_ns()))
        outbox.flush()
        outbox.tell(Failed(error=_cannot_start(config, error)))
    return None


def _cannot_start(config: EngineConfig, error: Exception) -> str:
    """Return one line for what nobody foresaw: memory that lacks, or a file that fools us."""
    if kind_of(error) == "memory":
        return (
            f"{config.model}: memory ran out while it was loaded ({line_of(error)}); "
            "a smaller --kv-cache-memory may help, or --dtype int4 with a file that has 4 bits"
        )
    return f"{config.model}: the engine cannot start with it ({line_of(error)})"


def engine_process(start: EngineStart) -> None:
    """Be the engine process: ignore Ctrl-C, which the server answers by draining."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "an engine process has a server as its parent"
    assert start.folder is not None, "a process shows its signs of life in a folder"
    with stacks_on_demand(Path(start.folder)):
        run_engine(replace(start, sentinel=parent.sentinel))
    if not parent.is_alive():
        shutil.rmtree(start.folder, ignore_errors=True)
