"""One measured run: a load sent by its own process, then the engine's record of it read back.

Owns the generator's process, the host's stolen time, and the form of a run: what clients saw, what
the engine recorded, on one clock. experiment.py and tune call it with a server that is idle, and
leave it idle. Must never keep two runs' load on one server at once.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.lab import record
from bench.lab.figures import SETTLE_SHARE, client_figures, counts
from bench.lab.serving import Served, ServerFailed
from bench.lab.workload import Slo, Workload, write
from bench.machine import StolenTime

SPARE_S = 60.0
"""Beyond its workload and cut-off, a generator that takes so long hangs."""

Tick = Callable[[float], None]
"""Told now and then how many seconds of a run have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """How a load is sent: `name` begins its request ids and is new to the server."""

    name: str
    cut_off_s: float
    slo: Slo
    scratch: Path
    tick: Tick = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run: its summary as in the result, and all that it was made from."""

    run: dict[str, Any]
    load: dict[str, Any]
    steps: dict[str, list[Any]]
    causes: dict[str, float]
    rounds: dict[str, Any] | None


def measure(served: Served, workload: Workload, send: Send) -> Measured:
    """Send the load and return the run; raises ServerFailed, also if no generator can run."""
    faults = _faults(served)
    cpu_from, busy_from, began = served.cpu_s(), busy_s(), time.time()
    with StolenTime() as stolen:
        load = sent(served.url, workload, send)
    cpu_s = served.cpu_s() - cpu_from
    others_s = busy_s() - busy_from - cpu_s - load["generator"]["cpu_share"] * stolen.seconds
    served.wait_idle()
    clock = record.clock_of(served, load)
    window = record.window_of(served, load, clock)
    steps = record.steps_of(served, window)
    figures = client_figures(load, ttft_ms=send.slo.ttft_ms, tpot_ms=send.slo.tpot_ms)
    engine = record.engine_figures(steps, window, workload.seconds, SETTLE_SHARE)
    return Measured(
        run={
            "began_unix_s": began,
            "seconds": stolen.seconds,
            "figures": figures | engine,
            "requests": counts(load),
            "generator": load["generator"],
            "clock": clock,
            "engine": window,
            "stolen_share": stolen.share,
            "server_cpu_share": cpu_s / max(1e-9, stolen.seconds),
            "others_cpu_share": max(0.0, others_s) / stolen.seconds / (os.cpu_count() or 1),
            "workload_digest": load["digest"],
            "faults": _faults(served) - faults,
        },
        load=load,
        steps=steps,
        causes=record.causes_of(served, window, send.name),
        rounds=record.rounds_of(served, window),
    )


def _faults(served: Served) -> int:
    return int(served.sql("SELECT count(*) FROM fault")[0][0])


def sent(url: str, workload: Workload, send: Send) -> dict[str, Any]:
    """Return what the generator wrote of one load, sent by a process of its own."""
    send.scratch.mkdir(parents=True, exist_ok=True)
    asked, written = send.scratch / "workload.json.gz", send.scratch / "load.json"
    written.unlink(missing_ok=True)
    write(workload, asked)
    command = [sys.executable, "-m", "bench.lab.generator", str(asked), "--url", url]
    command += ["--name", send.name, "--cut-off-s", str(send.cut_off_s), "--out", str(written)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    began = time.monotonic()
    try:
        while process.poll() is None:
            spent = time.monotonic() - began
            if spent > workload.seconds + send.cut_off_s + SPARE_S:
                raise ServerFailed("the load generator hangs")
            send.tick(spent)
            try:
                process.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    if process.returncode:
        raise ServerFailed(f"the load generator failed: {errors.decode(errors='replace')[-500:]}")
    found: dict[str, Any] = msgspec.json.decode(written.read_bytes())
    return found


def busy_s() -> float:
    """Return the CPU time that programs have used on this machine so far, 0 where unknown.

    What is left of it after the server's and the generator's is that of others: a run beside a
    compiler says little.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, hard, soft = map(int, stat.read_text().split(maxsplit=8)[1:8])
    return (user + nice + system + hard + soft) / os.sysconf("SC_CLK_TCK")
