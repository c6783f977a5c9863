"""Which attention backend and which ops serve: tables tried in order, refusals kept with reasons.

Owns the names that --attention-backend takes. engine/runner.py calls `choose` once at start and
engine/diagnosis.py asks what each would say. A backend asked for by name that cannot serve is an
error, never a quiet second choice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kernels.base import AttentionBackend, AttentionShape, BackendError, Ops, int8_refusal

Kernels = TypeVar("Kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What serves, and why what stands before it in the tables does not, by name."""

    backend: AttentionBackend
    ops: Ops
    refusals: dict[str, str]


def _sdpa() -> AttentionBackend:
    from kernels.sdpa import SdpaBackend  # noqa: PLC0415  loaded only when its turn comes

    return SdpaBackend()


def _reference() -> AttentionBackend:
    from kernels.reference import ReferenceBackend  # noqa: PLC0415

    return ReferenceBackend()


def _native() -> AttentionBackend:
    from kernels.native_ops import threads  # noqa: PLC0415
    from kernels.native_step import NativeBackend  # noqa: PLC0415

    return NativeBackend(threads())


def _native_ops() -> Ops:
    from kernels.native_ops import NativeOps, threads  # noqa: PLC0415

    return NativeOps(threads())


def _native_int8_ops() -> Ops:
    from kernels.native_ops import NativeInt8Ops, threads  # noqa: PLC0415

    return NativeInt8Ops(threads())


def _flash_attn() -> AttentionBackend:
    from kernels.flash_attn import FlashAttnBackend, installed  # noqa: PLC0415

    return FlashAttnBackend(installed())


def _triton() -> AttentionBackend:
    from kernels.triton.backend import TritonBackend  # noqa: PLC0415

    return TritonBackend()


def _triton_ops() -> Ops:
    from kernels.triton.ops import TritonOps  # noqa: PLC0415

    return TritonOps()


def _per_request() -> AttentionBackend:
    from kernels.per_request import PerRequestBackend  # noqa: PLC0415

    return PerRequestBackend(_best)


def _best(
    shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
) -> AttentionBackend:
    return choose("auto", shape, device=device, dtype=dtype, block_tokens=block_tokens).backend


def _native_int4_ops() -> Ops:
    from kernels.native_ops import NativeInt4Ops, threads  # noqa: PLC0415

    return NativeInt4Ops(threads())


def _onednn() -> Ops:
    from kernels.ops import OneDnnOps  # noqa: PLC0415

    return OneDnnOps()


def _torch() -> Ops:
    from kernels.ops import TorchOps  # noqa: PLC0415

    return TorchOps()


BACKENDS: tuple[tuple[str, Callable[[], AttentionBackend]], ...] = (
    ("native", _native),
    ("flash_attn", _flash_attn),
    ("triton", _triton),
    ("sdpa", _sdpa),
    ("reference", _reference),
    ("per_request", _per_request),
)
OPS: tuple[tuple[str, Callable[[], Ops]], ...] = (
    ("native", _native_ops),
    ("native-int8", _native_int8_ops),
    ("native-int4", _native_int4_ops),
    ("triton", _triton_ops),
    ("onednn", _onednn),
    ("torch", _torch),
)

BY_NAME_ALONE = {"per_request"}
"""What `auto` never is: it goes through what `auto` finds."""
ONLY_ON = {"flash_attn": "cuda", "triton": "cuda"}
"""The device of what is not even loaded for another, unless it is asked for by name."""


def choose(
    name: str,
    shape: AttentionShape,
    *,
    device: str,
    dtype: torch.dtype,
    block_tokens: int,
    int8_cache: bool = False,
) -> Choice:
    """Return the backend called `name`, or the first that serves for 'auto', and its ops.

    With int8_cache one serves only if it keeps keys and values in int8.
    Raises BackendError when the one asked for is unknown or cannot serve.
    """
    refusals: dict[str, str] = {}
    known = [entry for entry, _ in BACKENDS]
    if name not in ("auto", *known):
        raise BackendError(f"no attention backend {name!r}; there are {', '.join(known)}")
    ops = _first_ops(device, dtype, refusals)

    def supports(it: AttentionBackend) -> str | None:
        if reason := it.supports(shape, device, dtype, block_tokens):
            return reason
        return int8_refusal(it, shape, device, dtype, block_tokens) if int8_cache else None

    for entry, load in BACKENDS:
        if entry != name and (name != "auto" or entry in BY_NAME_ALONE):
            continue
        other = _other_device(entry, device) if name == "auto" else None
        served = tried(load, supports, other_device=other)
        if not isinstance(served, str):
            return Choice(backend=served, ops=ops, refusals=refusals)
        refusals[entry] = served
    why = _told(refusals) if name == "auto" else refusals[name]
    raise BackendError(f"attention backend {name!r} cannot serve: {why}")


def _first_ops(device: str, dtype: torch.dtype, refusals: dict[str, str]) -> Ops:
    def supports(it: Ops) -> str | None:
        return it.supports(device, dtype)

    for entry, load in OPS:
        served = tried(load, supports, other_device=_other_device(entry, device))
        if not isinstance(served, str):
            return served
        refusals[f"{entry} ops"] = served
    raise BackendError(f"no set of ops can serve: {_told(refusals)}")


def refusals_of(
    shape: AttentionShape, *, device: str, dtype: torch.dtype, block_tokens: int
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Return why each backend would refuse, and each set of ops; None if it would serve."""

    def attends(it: AttentionBackend) -> str | None:
        return it.supports(shape, device, dtype, block_tokens)

    def computes(it: Ops) -> str | None:
        return it.supports(device, dtype)

    backends: dict[str, str | None] = {}
    for entry, load in BACKENDS:
        backend = tried(load, attends, other_device=_other_device(entry, device))
        backends[entry] = backend if isinstance(backend, str) else None
    ops: dict[str, str | None] = {}
    for entry, load_ops in OPS:
        some = tried(load_ops, computes, other_device=_other_device(entry, device))
        ops[entry] = some if isinstance(some, str) else None
    return backends, ops


def serving(device: str, dtype: torch.dtype) -> dict[str, Ops]:
    """Return every set of ops that serves, by name, in the table's order."""

    def supports(it: Ops) -> str | None:
        return it.supports(device, dtype)

    found: dict[str, Ops] = {}
    for entry, load in OPS:
        ops = tried(load, supports, other_device=_other_device(entry, device))
        if not isinstance(ops, str):
            found[entry] = ops
    return found


def _other_device(entry: str, device: str) -> str | None:
    needed = ONLY_ON.get(entry, device)
    return None if needed == device else f"runs on {needed.upper()}, not on {device}"


def tried(
    load: Callable[[], Kernels],
    supports: Callable[[Kernels], str | None],
    *,
    other_device: str | None,
) -> Kernels | str:
    """Return what was loaded and serves, or why not; nothing is loaded for another device."""
    if other_device is not None:
        return other_device
    try:
        kernels = load()
        reason = supports(kernels)
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be loaded: {error}".splitlines()[0]
    return kernels if reason is None else reason


def _told(refusals: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
