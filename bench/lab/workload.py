"""A workload: who asks what, when, and when they leave; and the file that holds it, bit for bit.

Owns the form of that file and its reading and writing. bench/lab/make.py makes workloads, the
generator sends them; a file is all that a run needs, so that anyone can send the same load to any
server again. Prompts stand in it as they are sent. Must never draw a random number.
"""

import gzip
import hashlib
import zlib
from pathlib import Path

import msgspec

FORM = "iterscope-workload-1"
ASKS_MAX = 200_000
SECONDS_MAX = 86_400
TOKENS_MAX = 2**31
ROUNDED_S = 1e-3
"""Instants are kept rounded: the last may lie so much behind the end."""


class WorkloadError(Exception):
    """A workload that cannot be: one line that names the field."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When tokens are due, ms from the scheduled instant: token j at ttft + j x tpot."""

    ttft_ms: float
    tpot_ms: float


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. `at_s` is its instant from the start; None in a closed loop, where each follows.

    `prompt` is token ids or text, as the API takes it. `leaves_after_s` is how long after it was
    sent the client goes away, whatever has come.
    """

    prompt: list[int] | str
    max_tokens: int
    at_s: float | None = None
    prompt_tokens: int | None = None
    ignore_eos: bool = True
    tenant: str | None = None
    priority: int | None = None
    slo: Slo | None = None
    leaves_after_s: float | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order of their instants, and where they come from.

    `seconds` is how long requests are sent. With `concurrency` it is a closed loop: so many are in
    flight, each `think_s` after the one before it ended. `scale` is what lengths of the source were
    multiplied by so that they fit `context_tokens`.
    """

    form: str = FORM
    name: str
    source: str
    licence: str
    arrivals: str
    seed: int
    seconds: float
    asks: list[Ask]
    rate: float | None = None
    concurrency: int | None = None
    think_s: float = 0.0
    scale: float = 1.0
    context_tokens: int | None = None


def encode(workload: Workload) -> bytes:
    """Return the file's bytes; the same workload has the same ones."""
    return gzip.compress(msgspec.json.encode(workload), 6, mtime=0)


def digest(workload: Workload) -> str:
    """Return what tells two workloads apart."""
    return hashlib.sha256(msgspec.json.encode(workload)).hexdigest()[:16]


def write(workload: Workload, path: Path) -> None:
    """Write the file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_bytes(encode(workload))
    unfinished.replace(path)


def read(path: Path) -> Workload:
    """Return the workload of a file, plain or compressed; raises WorkloadError."""
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        workload = msgspec.json.decode(content, type=Workload)
    except gzip.BadGzipFile as error:
        raise WorkloadError(f"{path} is no workload: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, zlib.error) as error:
        raise WorkloadError(f"{path} is no workload: {error}") from error
    check(workload)
    return workload


def check(workload: Workload) -> None:
    """Raise WorkloadError for what types cannot say."""
    if workload.form != FORM:
        raise WorkloadError(f"form: {workload.form!r} is not {FORM!r}")
    if not 0 < workload.seconds <= SECONDS_MAX:
        raise WorkloadError(f"seconds: must be above 0 and at most {SECONDS_MAX}")
    if not 0 <= workload.think_s <= SECONDS_MAX:
        raise WorkloadError(f"think_s: must lie within 0 and {SECONDS_MAX}")
    if not 0 < len(workload.asks) <= ASKS_MAX:
        raise WorkloadError(f"asks: there must be 1 to {ASKS_MAX}")
    if workload.concurrency is not None and not 1 <= workload.concurrency <= 4096:
        raise WorkloadError("concurrency: must lie within 1 and 4096")
    last = 0.0
    for number, ask in enumerate(workload.asks):
        where = f"asks[{number}]"
        _check_ask(ask, where)
        if workload.concurrency is not None:
            continue
        if ask.at_s is None or not last <= ask.at_s:
            raise WorkloadError(f"{where}.at_s: instants must be given and ascend")
        if ask.at_s > workload.seconds + ROUNDED_S:
            raise WorkloadError(f"{where}.at_s: lies beyond the workload's seconds")
        last = ask.at_s


def _check_ask(ask: Ask, where: str) -> None:
    if not ask.prompt:
        raise WorkloadError(f"{where}.prompt: is empty")
    if not 1 <= ask.max_tokens <= TOKENS_MAX:
        raise WorkloadError(f"{where}.max_tokens: must lie within 1 and {TOKENS_MAX}")
    if ask.priority is not None and not -(2**63) <= ask.priority < 2**63:
        raise WorkloadError(f"{where}.priority: is no number of 64 bits")
    if ask.leaves_after_s is not None and ask.leaves_after_s < 0:
        raise WorkloadError(f"{where}.leaves_after_s: must not be negative")
    if ask.slo is not None and not (ask.slo.ttft_ms > 0 and ask.slo.tpot_ms > 0):
        raise WorkloadError(f"{where}.slo: times must be above 0")
    # It stands in a line of the request's head: a line break would begin another.
    if ask.tenant is not None and not ask.tenant.isprintable():
        raise WorkloadError(f"{where}.tenant: has what cannot stand in a header")
