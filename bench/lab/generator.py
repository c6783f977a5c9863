"""The load: every request at its scheduled instant, in a process of its own, against any server.

Owns the schedule, who leaves when, the cut-off, and whether the generator itself was the limit; run
as `python -m bench.lab.generator WORKLOAD --url URL --out FILE` by the experiment and by `iterscope
lab load`. Latency counts from the scheduled instant, so a send that was late is the server's burden
and is told. Must never wait for an answer before the next is due.
"""

import argparse
import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from bench.lab.http_stream import Answer, Stream, Target, answer_of, request_bytes, target_of
from bench.lab.workload import Ask, Workload, WorkloadError, digest, read

FORM = "iterscope-load-1"
LEAD_S = 0.2
"""From being ready to the workload's zero."""
PULSE_S = 0.01
LATE_MS_MAX, CPU_SHARE_MAX = 20.0, 0.75
"""Beyond either the generator is called the bottleneck: late sends at p99, or its one core full."""


@dataclass(slots=True)
class Sent:
    """One request as it went; instants on CLOCK_MONOTONIC."""

    number: int
    scheduled_ns: int
    sent_ns: int
    stream: Stream | None = None
    ended_ns: int = 0
    outcome: str = "unfinished"
    trouble: str = ""


@dataclass(slots=True)
class Load:
    """A workload on its way to a target."""

    workload: Workload
    target: Target
    cut_off_s: float
    starts_ns: int = 0
    """The workload's zero on CLOCK_MONOTONIC; 0 is as soon as it is ready."""
    sent: list[Sent] = field(default_factory=list)
    lags_ns: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    spent_s: float = 0.0
    stopped: bool = False
    """Cut short by whoever started it: what was under way is unfinished."""


async def send(load: Load) -> None:
    """Send it all, and wait for the answers until the cut-off; stopped, leave all at once."""
    bodies = [
        request_bytes(load.target, number, ask) for number, ask in enumerate(load.workload.asks)
    ]
    gc.freeze()
    gc.disable()  # a collection over all that was read would stamp tokens late
    ready_ns = time.monotonic_ns()
    if 0 < load.starts_ns < ready_ns:
        raise WorkloadError(f"--zero-ns {load.starts_ns} is past: ready at {ready_ns}")
    load.starts_ns = load.starts_ns or ready_ns + int(LEAD_S * 1e9)
    cpu_from = time.process_time()
    pulse = asyncio.create_task(_pulse(load))
    tasks: list[asyncio.Task[None]] = []
    try:
        with _stopped_by_signals(load):
            await _sent_and_answered(load, bodies, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pulse.cancel()
        load.cpu_s = time.process_time() - cpu_from
        load.spent_s = (time.monotonic_ns() - ready_ns) / 1e9
        gc.enable()


@contextmanager
def _stopped_by_signals(load: Load) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM cancel the task between callbacks: raised inside one they are lost.

    Not where signals cannot be taken, which is outside the main thread.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        load.stopped = True
        task.cancel()

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, stop)
            before[number] = handler
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _sent_and_answered(
    load: Load, bodies: list[bytes], tasks: list[asyncio.Task[None]]
) -> None:
    """Add a task for each request, or for each place of a closed loop, and wait for them."""
    if load.workload.concurrency is None:
        await _open_loop(load, bodies, tasks)
    else:
        numbers = iter(range(len(bodies)))
        places = range(load.workload.concurrency)
        tasks += [asyncio.create_task(_closed_loop(load, bodies, numbers)) for _ in places]
    until_s = load.workload.seconds + load.cut_off_s
    await asyncio.wait(tasks, timeout=max(0.0, until_s - _now_s(load)))


async def _open_loop(load: Load, bodies: list[bytes], tasks: list[asyncio.Task[None]]) -> None:
    for number, ask in enumerate(load.workload.asks):
        at_ns = load.starts_ns + int((ask.at_s or 0.0) * 1e9)
        while (left_ns := at_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        tasks.append(asyncio.create_task(_one(load, number, bodies[number], at_ns)))


async def _closed_loop(load: Load, bodies: list[bytes], numbers: Iterator[int]) -> None:
    """Send one after the other, from the zero until sending is over."""
    await asyncio.sleep(max(0.0, -_now_s(load)))
    while _now_s(load) < load.workload.seconds:
        number = next(numbers, None)
        if number is None:
            return
        await _one(load, number, bodies[number], time.monotonic_ns())
        if load.workload.think_s:
            await asyncio.sleep(load.workload.think_s)


async def _one(load: Load, number: int, body: bytes, scheduled_ns: int) -> None:
    loop, target = asyncio.get_running_loop(), load.target
    ended: asyncio.Future[None] = loop.create_future()
    sent = Sent(number, scheduled_ns, time.monotonic_ns())
    load.sent.append(sent)
    leaves_after_s = load.workload.asks[number].leaves_after_s
    try:
        _, stream = await loop.create_connection(
            lambda: Stream(body, ended), target.host, target.port, ssl=target.secure
        )
        sent.stream = stream
        async with asyncio.timeout(leaves_after_s):
            await ended
        sent.outcome = "finished"
    except OSError as error:
        if isinstance(error, TimeoutError) and sent.stream is not None:
            sent.outcome = "left"
        else:
            sent.outcome, sent.trouble = "failed", str(error)
    finally:
        sent.ended_ns = time.monotonic_ns()
        if sent.stream is not None:
            sent.stream.leave()


async def _pulse(load: Load) -> None:
    """Measure how late this loop itself is."""
    while True:
        due_ns = time.monotonic_ns() + int(PULSE_S * 1e9)
        await asyncio.sleep(PULSE_S)
        load.lags_ns.append(time.monotonic_ns() - due_ns)


def _now_s(load: Load) -> float:
    return (time.monotonic_ns() - load.starts_ns) / 1e9


def told(load: Load) -> dict[str, Any]:
    """Return the load as it went: instants in ns from the workload's zero.

    Of one that was stopped, sending and the wait for answers took as long as they lasted.
    """
    seconds, cut_off_s = load.workload.seconds, load.cut_off_s
    if load.stopped:
        until_s = _now_s(load)
        seconds = max(0.0, min(seconds, until_s))
        cut_off_s = max(0.0, min(cut_off_s, until_s - seconds))
    asks = [
        _told(load, sent, answer_of(sent.stream.reads if sent.stream else []))
        for sent in sorted(load.sent, key=lambda sent: sent.number)
    ]
    return {
        "form": FORM,
        "workload": load.workload.name,
        "digest": digest(load.workload),
        "seconds": seconds,
        "cut_off_s": cut_off_s,
        "stopped": load.stopped,
        "zero_monotonic_ns": load.starts_ns,
        "began_unix_s": time.time() - _now_s(load),
        "name": load.target.name,
        "asks": asks,
        "generator": _generator(load),
    }


def _told(load: Load, sent: Sent, answer: Answer) -> dict[str, Any]:
    ask: Ask = load.workload.asks[sent.number]
    outcome, error = sent.outcome, sent.trouble or answer.trouble
    if outcome == "finished" and (error or not answer.complete or answer.status != 200):
        outcome = "refused" if answer.status in (429, 503) else "failed"
    return {
        "number": sent.number,
        "scheduled_ns": sent.scheduled_ns - load.starts_ns,
        "sent_ns": sent.sent_ns - load.starts_ns,
        "ended_ns": sent.ended_ns - load.starts_ns,
        "outcome": outcome,
        "status": answer.status,
        "finish": answer.finish,
        "error": error[:300],
        "wanted": ask.max_tokens,
        "prompt_tokens": answer.counted_prompt or ask.prompt_tokens,
        "output_tokens": answer.counted_output,
        "tenant": ask.tenant,
        "slo": None if ask.slo is None else [ask.slo.ttft_ms, ask.slo.tpot_ms],
        "tokens_ns": [at_ns - load.starts_ns for at_ns in answer.tokens_ns],
        "ids": answer.ids,
        "text": "" if answer.ids else "".join(answer.text),
    }


def _generator(load: Load) -> dict[str, Any]:
    late = sorted((sent.sent_ns - sent.scheduled_ns) / 1e6 for sent in load.sent) or [0.0]
    lags = sorted(lag / 1e6 for lag in load.lags_ns) or [0.0]
    found = {
        "late_ms_p50": late[len(late) // 2],
        "late_ms_p99": late[len(late) * 99 // 100],
        "late_ms_max": late[-1],
        "loop_lag_ms_p99": lags[len(lags) * 99 // 100],
        "loop_lag_ms_max": lags[-1],
        "cpu_share": load.cpu_s / max(1e-9, load.spent_s),
    }
    limit = found["late_ms_p99"] > LATE_MS_MAX or found["cpu_share"] > CPU_SHARE_MAX
    return found | {"bottleneck": limit}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser what a load needs."""
    parser.add_argument("workload", type=Path, help="file that `iterscope lab workload` wrote")
    parser.add_argument("--url", required=True, help="server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="model to ask for; the first one by default")
    parser.add_argument("--name", default="lab", help="what request ids begin with")
    parser.add_argument("--api-key")
    parser.add_argument("--body", default="{}", metavar="JSON", help="what every body has beside")
    parser.add_argument(
        "--cut-off-s", type=float, default=10.0, help="seconds that answers get after the last"
    )
    parser.add_argument(
        "--zero-ns",
        type=int,
        default=0,
        help="CLOCK_MONOTONIC's instant of the workload's zero, for several generators in step",
    )
    parser.add_argument("--out", type=Path, required=True, help="file for every token's instant")


def served_model(url: str, api_key: str | None) -> str:
    """Return the first model that a server has; raises ValueError, one line, if it tells none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    place = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        answer = httpx.get(place, headers=headers, timeout=10.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{place} was not asked for its models: {why}") from error
    if answer.status_code != 200:
        elsewhere = answer.headers.get("location")
        told = f" and leads to {elsewhere[:200]!r}" if elsewhere else ""
        raise ValueError(f"{place} answers {answer.status_code}{told}, where models are listed")
    try:
        return str(answer.json()["data"][0]["id"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{place} names no model") from error


def _target(flags: argparse.Namespace) -> Target:
    """Return where the load goes; raises WorkloadError, which names the flag."""
    try:
        extra = json.loads(flags.body)
    except ValueError as error:
        raise WorkloadError(f"--body {flags.body!r} is no JSON: {error}") from error
    try:
        model = flags.model or served_model(flags.url, flags.api_key)
        return target_of(
            flags.url, model=model, name=flags.name, api_key=flags.api_key, extra=extra
        )
    except ValueError as error:
        raise WorkloadError(f"--url {flags.url}: {error}") from error


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Send the load that the parsed flags ask for, write it and return it; raises WorkloadError.

    Ctrl-C or SIGTERM ends it early: what was sent by then is written, and `stopped` says so. Before
    anything was sent it is KeyboardInterrupt.
    """
    workload = read(flags.workload)
    load = Load(workload, _target(flags), flags.cut_off_s, flags.zero_ns)
    try:
        uvloop.run(send(load))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not load.sent:
            raise KeyboardInterrupt from None
        load.stopped = True
    found = told(load)
    unfinished = flags.out.with_name(f".{flags.out.name}.part")
    unfinished.write_bytes(msgspec.json.encode(found))
    unfinished.replace(flags.out)
    return found


def main() -> int:
    """Send one load; 2 when it cannot be sent, 130 when it was stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_flags(parser)
    try:
        stopped = run(parser.parse_args())["stopped"]
    except KeyboardInterrupt:
        stopped = True
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return 2
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
