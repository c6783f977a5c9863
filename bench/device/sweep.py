"""Which tiles serve the Triton kernels best on this device: the fastest of a few are kept.

Owns the steps that candidates are timed on, and has the best written to kernels/tuning/DEVICE.json,
which the backend reads, and to `--out`, for an installation that may not be written. A candidate
that does not compile, or needs more than the device has, is out. On a CPU the path alone is run, in
the interpreter, and nothing is written.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.device.table import Bench, Row, Verdict
from kernels.base import AttentionBatch, AttentionShape
from kernels.triton import launch

ROUNDS = 5
TRIED_TINY = 2
LEFT_S = 15.0
"""Seconds before the end at which the sweep stops: it comes last and takes what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A step: so many rows of so many tokens each, with a context."""

    shape: AttentionShape
    rows: int
    tokens: int
    context: int
    block_tokens: int


def _shape(heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


TINY = (Load(shape=_shape(2, 1, 32), rows=2, tokens=1, context=20, block_tokens=16),)
LOADS = tuple(
    Load(shape=shape, rows=rows, tokens=tokens, context=2048, block_tokens=block_tokens)
    for block_tokens in (16, 256)
    for shape in (_shape(32, 8, 128), _shape(16, 8, 128), _shape(32, 8, 64))
    for rows, tokens in ((64, 1), (4, 512))
)


def tiles(bench: Bench) -> list[Row]:
    """Time every candidate on every load; keep the best."""
    try:
        from kernels.triton.backend import device_of  # noqa: PLC0415  a CPU has no Triton
    except ImportError as error:
        return [Row(part="sweep", case="triton", figure=str(error), verdict="skipped")]
    rows: list[Row] = []
    best: dict[str, launch.Tiles] = {}
    facts, dtype = device_of(torch.device(bench.device)), bench.dtypes[0]
    loads = TINY if bench.tiny else LOADS
    for place, load in enumerate(loads):
        until_left_s = bench.left_s - (bench.left_s - LEFT_S) / (len(loads) - place)
        entry = launch.entry_name(
            load.shape,
            item_bytes=dtype.itemsize,
            block_tokens=load.block_tokens,
            decode=load.tokens == 1,
        )
        wanted = launch.candidate_tiles(
            load.shape, facts, item_bytes=dtype.itemsize, decode=load.tokens == 1
        )
        found: list[tuple[float, int]] = []
        for number in _order(len(wanted))[: TRIED_TINY if bench.tiny else None]:
            if bench.left_s < until_left_s:
                break
            if (ms := _timed(bench, load, wanted[number])) is not None:
                found.append((ms, number))
        if not found:
            verdict: Verdict = "skipped" if bench.left_s < until_left_s else "bad"
            rows.append(Row(part="sweep", case=entry, figure="none was timed", verdict=verdict))
            continue
        ms, number = min(found)
        best[entry] = one = wanted[number]
        figure = f"{ms * 1e3:.0f} us with {one.block_m} x {one.tile}, {one.warps} warps, "
        figure += f"{one.stages} stages; {len(found)} of {len(wanted)} tried"
        rows.append(Row(part="sweep", case=entry, figure=figure))
    if best and bench.device == "cuda":
        rows += keep(bench.out, facts.name, best)
    return rows


def keep(out: Path | None, device_name: str, best: dict[str, launch.Tiles]) -> list[Row]:
    """Write the tiles where the backend reads them, and into a folder; return what was written.

    An installed package may not be writable: then the folder's copy is what there is.
    """
    rows: list[Row] = []
    if out:
        copy = out / launch.tuning_file(device_name).name
        tiles = {name: asdict(one) for name, one in sorted(best.items())}
        told = {"device": device_name, "attention": tiles}
        out.mkdir(parents=True, exist_ok=True)
        copy.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        rows.append(Row(part="sweep", case="written", figure=str(copy)))
    try:
        kept = launch.write_tuned(device_name, best)
    except OSError as error:
        told_of = f"{launch.TUNING}: {error.strerror}"
        told_of += f"; copy {rows[0].figure} there" if rows else "; --out FOLDER keeps the tiles"
        return [*rows, Row(part="sweep", case="installed", figure=told_of, verdict="skipped")]
    return [*rows, Row(part="sweep", case="installed", figure=str(kept))]


def _order(count: int) -> list[int]:
    """Return the default, which comes first, and the others in no order: not all may be tried."""
    return [0, *random.Random(7).sample(range(1, count), count - 1)]


@torch.inference_mode()
def _timed(bench: Bench, load: Load, tiles: launch.Tiles) -> float | None:
    """Return the ms of one layer's attention with these tiles; None where they cannot be."""
    import triton  # noqa: PLC0415

    from kernels.triton.backend import TritonBackend, device_of  # noqa: PLC0415

    backend = TritonBackend(device_of(torch.device(bench.device)), tiles)
    batch, shape, dtype = _batch(bench, load), load.shape, bench.dtypes[0]
    blocks, tokens = 1 + batch.block_tables.numel(), load.rows * load.tokens
    cache = backend.allocate_kv(shape, blocks, load.block_tokens, dtype, bench.device)
    q = bench.random(tokens, shape.heads, shape.head_dim, dtype=dtype, seed=1)
    k = bench.random(tokens, shape.kv_heads, shape.head_dim, dtype=dtype, seed=2)
    try:
        prepared = backend.prepare(batch, cache)
        return bench.milliseconds(
            lambda: backend.attend(0, q, k, k, cache, prepared), 1 if bench.tiny else ROUNDS
        )
    except (RuntimeError, ValueError, triton.TritonError):
        return None  # more shared memory or registers than there are


def _batch(bench: Bench, load: Load) -> AttentionBatch:
    """Return the load's step; each row's blocks lie apart."""
    each = -(-load.context // load.block_tokens)
    table = torch.arange(1, 1 + load.rows * each, dtype=torch.int32, device=bench.device)
    tables = table.view(each, load.rows).T.contiguous()
    places = torch.arange(load.context - load.tokens, load.context, device=bench.device)
    blocks = tables.long().index_select(1, places // load.block_tokens)
    slots = blocks * load.block_tokens + places % load.block_tokens
    return AttentionBatch(
        query_starts=bench.whole([row * load.tokens for row in range(load.rows + 1)], torch.int32),
        context_lengths=bench.whole([load.context] * load.rows, torch.int32),
        slot_mapping=slots.flatten(),
        block_tables=tables,
        query_lengths_host=[load.tokens] * load.rows,
        context_lengths_host=[load.context] * load.rows,
    )
