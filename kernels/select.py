"""Which attention backend and which ops serve: tables tried in order, refusals kept with reasons.

Owns the names that --attention-backend takes. engine/runner.py calls `choose` once at start. A
backend asked for by name that cannot serve is an error, never a quiet second choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.base import AttentionBackend, AttentionShape, BackendError, Ops


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


def _onednn() -> Ops:
    from kernels.ops import OneDnnOps  # noqa: PLC0415

    return OneDnnOps()


def _torch() -> Ops:
    from kernels.ops import TorchOps  # noqa: PLC0415

    return TorchOps()


BACKENDS: tuple[tuple[str, Callable[[], AttentionBackend]], ...] = (
    ("native", _native),
    ("sdpa", _sdpa),
    ("reference", _reference),
)
OPS: tuple[tuple[str, Callable[[], Ops]], ...] = (
    ("native", _native_ops),
    ("native-int8", _native_int8_ops),
    ("onednn", _onednn),
    ("torch", _torch),
)


def choose(
    name: str, shape: AttentionShape, *, device: str, dtype: torch.dtype, block_tokens: int
) -> Choice:
    """Return the backend called `name`, or the first that serves for 'auto', and its ops.

    Raises BackendError when the one asked for is unknown or cannot serve.
    """
    refusals: dict[str, str] = {}
    known = [entry for entry, _ in BACKENDS]
    if name not in ("auto", *known):
        raise BackendError(f"no attention backend {name!r}; there are {', '.join(known)}")
    ops = _first_ops(device, dtype, refusals)
    for entry, load in BACKENDS:
        if name not in ("auto", entry):
            continue
        try:
            backend = load()
            reason = backend.supports(shape, device, dtype, block_tokens)
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"cannot be loaded: {error}".splitlines()[0]
        if reason is None:
            return Choice(backend=backend, ops=ops, refusals=refusals)
        refusals[entry] = reason
    raise BackendError(f"attention backend {name!r} cannot serve: {_told(refusals)}")


def _first_ops(device: str, dtype: torch.dtype, refusals: dict[str, str]) -> Ops:
    for entry, load in OPS:
        try:
            ops = load()
            reason = ops.supports(device, dtype)
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"cannot be loaded: {error}".splitlines()[0]
        if reason is None:
            return ops
        refusals[f"{entry} ops"] = reason
    raise BackendError(f"no set of ops can serve: {_told(refusals)}")


def _told(refusals: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
