"""Every attention backend against the reference, every set of ops against PyTorch's own.

Owns the cases (odd lengths, histories, grouped heads, a window, a cap) and the tolerances. The
first part of the device check: what is wrong here makes every other figure void.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.device.table import Bench, Row, compared, differing
from kernels.base import AttentionBackend, AttentionBatch, AttentionShape, Ops
from kernels.choose import Drawn
from kernels.ops import TorchOps
from kernels.reference import ReferenceBackend
from kernels.select import BACKENDS, OPS

TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Over the largest value; float32 products are TensorFloat32 where a device has that."""

UNEQUAL_DRAWS = 0.02
"""Share of draws that may differ, since sums of many weights are rounded in another order."""

WRONG_SCALE = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows as (tokens before the step, tokens of the step)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    window: int = 0
    cap: float | None = None

    @property
    def shape(self) -> AttentionShape:
        """Return what a backend is told of the model."""
        windows = (self.window,) if self.window else ()
        return AttentionShape(
            layers=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            windows=windows,
            cap=self.cap,
        )


TINY_CASES = (
    Case(name="prefill and decodes", rows=((0, 19), (33, 1), (7, 1), (5, 4))),
    Case(name="decodes", rows=((16, 1), (1, 1), (40, 1)), head_dim=32, heads=2, kv_heads=1),
)
CASES = (
    Case(name="prefill", rows=((0, 1), (0, 17), (0, 130), (0, 1000))),
    Case(name="history", rows=((5, 3), (100, 65), (511, 130), (2000, 17))),
    Case(name="decodes", rows=((0, 1), (15, 1), (16, 1), (1000, 1), (4000, 1))),
    Case(name="mixed", rows=((1000, 1), (3, 1), (0, 300), (700, 64), (63, 1))),
    Case(name="8 heads a key head", rows=((900, 1), (31, 40)), heads=32, kv_heads=4, head_dim=128),
    Case(name="one key head each", rows=((900, 1), (31, 40)), heads=8, kv_heads=8, head_dim=128),
    Case(name="wide heads", rows=((900, 1), (31, 40)), head_dim=256),
    Case(name="window", rows=((900, 1), (300, 40), (0, 200)), window=128),
    Case(name="cap", rows=((900, 1), (31, 40)), cap=30.0),
    Case(name="pages of 256", rows=((900, 1), (300, 40), (0, 600)), block_tokens=256, head_dim=128),
)


def attention(bench: Bench) -> list[Row]:
    """Return a row for each case of each backend that serves it."""
    cases = TINY_CASES if bench.tiny else CASES
    rows: list[Row] = []
    for name, load in BACKENDS:
        if name == "reference":
            continue
        backend = _loaded(load)
        if isinstance(backend, str):
            rows.append(Row(part="attention", case=name, figure=backend, verdict="skipped"))
            continue
        refusals: set[str] = set()
        for dtype in _dtypes(bench, name):
            for case in cases:
                why = backend.supports(case.shape, bench.device, dtype, case.block_tokens)
                if why:
                    refusals.add(why)
                    continue
                found = _attended(bench, backend, case, dtype, wrong=bench.wrong_scale)
                true = _attended(bench, ReferenceBackend(), case, dtype, wrong=False)
                label = f"{name}: {case.name}, {str(dtype).removeprefix('torch.')}"
                rows.append(
                    compared("attention", label, differing(found, true), _tolerance(name, dtype))
                )
        rows += [
            Row(part="attention", case=name, figure=why, verdict="skipped")
            for why in sorted(refusals)
        ]
    return rows


def _loaded(load: Callable[[], AttentionBackend]) -> AttentionBackend | str:
    try:
        return load()
    except (ImportError, OSError, RuntimeError) as error:
        return f"cannot be loaded: {error}".splitlines()[0]


def _dtypes(bench: Bench, name: str) -> tuple[torch.dtype, ...]:
    """Return the types to check in: C++ has no float32, Triton's interpreter no bf16."""
    return (torch.bfloat16,) if name == "native" else bench.dtypes


def _tolerance(name: str, dtype: torch.dtype) -> float:
    """Return how far a backend may be off: the native one keeps its cache in bf16."""
    return TOLERANCE[torch.bfloat16 if name == "native" else dtype]


@torch.inference_mode()
def _attended(
    bench: Bench, backend: AttentionBackend, case: Case, dtype: torch.dtype, *, wrong: bool
) -> torch.Tensor:
    """Return what a backend finds; each row's past is written first, as an earlier step would."""
    shape = case.shape
    totals = [before + now for before, now in case.rows]
    blocks = 1 + sum(-(-total // case.block_tokens) for total in totals)
    cache = backend.allocate_kv(shape, blocks, case.block_tokens, dtype, bench.device)
    keys = [
        bench.random(2, total, case.kv_heads, case.head_dim, dtype=dtype, seed=11 + row)
        for row, total in enumerate(totals)
    ]
    pasts = [(0, before) for before, _ in case.rows]
    if any(before for _, before in pasts):
        _step(bench, backend, case, cache, (pasts, keys, 1.0))
    return _step(
        bench, backend, case, cache, (list(case.rows), keys, WRONG_SCALE if wrong else 1.0)
    )


def _step(
    bench: Bench,
    backend: AttentionBackend,
    case: Case,
    cache: object,
    work: tuple[list[tuple[int, int]], list[torch.Tensor], float],
) -> torch.Tensor:
    """Run one step of the rows that have tokens in it."""
    spans, keys, scale = work
    live = [row for row, (_, now) in enumerate(spans) if now]
    tables = _tables(case)
    width = max(len(tables[row]) for row in live)
    slots, starts = [], [0]
    for row in live:
        before, now = spans[row]
        starts.append(starts[-1] + now)
        for at in range(before, before + now):
            block = tables[row][at // case.block_tokens]
            slots.append(block * case.block_tokens + at % case.block_tokens)
    contexts = [sum(spans[row]) for row in live]
    padded = [tables[row] + [0] * (width - len(tables[row])) for row in live]
    batch = AttentionBatch(
        query_starts=bench.whole(starts, torch.int32),
        context_lengths=bench.whole(contexts, torch.int32),
        slot_mapping=bench.whole(slots),
        block_tables=torch.stack([bench.whole(one, torch.int32) for one in padded]),
        query_lengths_host=[spans[row][1] for row in live],
        context_lengths_host=contexts,
    )
    parts = [keys[row][:, spans[row][0] : sum(spans[row])] for row in live]
    k, v = torch.cat(parts, dim=1)
    q = bench.random(len(slots), case.heads, case.head_dim, dtype=k.dtype, seed=5) * scale
    return backend.attend(0, q, k, v, cache, backend.prepare(batch, cache))


def _tables(case: Case) -> list[list[int]]:
    """Return blocks from 1 on for each row, the last row's first, so that none is in order."""
    tables, free = [], 1
    for before, now in reversed(case.rows):
        count = -(-(before + now) // case.block_tokens)
        tables.append(list(reversed(range(free, free + count))))
        free += count
    return tables[::-1]


# ---- the ops


def ops(bench: Bench) -> list[Row]:
    """Return a row for each op of each set that serves."""
    rows: list[Row] = []
    for name, load in OPS:
        if name in ("torch", "native-int8", "native-int4"):  # of few bits: tests/ and bench.quality
            continue
        for dtype in _dtypes(bench, name):
            try:
                found = load()
                why = found.supports(bench.device, dtype)
            except (ImportError, OSError, RuntimeError) as error:
                why = f"cannot be loaded: {error}".splitlines()[0]
            if why:
                rows.append(Row(part="ops", case=name, figure=why, verdict="skipped"))
                continue
            rows += _ops_rows(bench, name, found, dtype)
    return rows


def _ops_rows(bench: Bench, name: str, found: Ops, dtype: torch.dtype) -> list[Row]:
    count, size, heads, head_dim = (5, 96, 3, 32) if bench.tiny else (33, 4096, 40, 128)
    true = TorchOps()

    def made(*shape: int, seed: int) -> torch.Tensor:
        return bench.random(*shape, dtype=dtype, seed=seed)

    x, residual, weight = made(count, size, seed=1), made(count, size, seed=2), made(size, seed=3)
    matrix = made(64, size, seed=4) * size**-0.5
    turns = bench.random(count, head_dim // 2, 2, dtype=torch.float32, seed=5)
    stretch = WRONG_SCALE if bench.wrong_scale else 1.0
    works: dict[str, Callable[[Ops], torch.Tensor]] = {
        "linear": lambda it: it.linear(x * _of(it, stretch), it.pack(matrix.clone())),
        "rms_norm": lambda it: it.rms_norm(x, weight * _of(it, stretch), 1e-5),
        "add_rms_norm": lambda it: it.add_rms_norm(
            x.clone(), residual.clone(), weight * _of(it, stretch), 1e-5
        )[0],
        "rope": lambda it: it.rope(made(count, heads, head_dim, seed=6), turns * _of(it, stretch)),
        "silu": lambda it: it.silu_multiply(made(count, 2 * size, seed=7) * _of(it, stretch)),
        "gelu": lambda it: it.gelu_multiply(made(count, 2 * size, seed=8) * _of(it, stretch)),
    }
    rows = []
    with torch.inference_mode():
        for op, work in works.items():
            label = f"{name}: {op}, {str(dtype).removeprefix('torch.')}"
            rows.append(
                compared("ops", label, differing(work(found), work(true)), _tolerance(name, dtype))
            )
        rows.append(_draws(bench, name, found))
    return rows


def _of(it: Ops, stretch: float) -> float:
    """Return by how much a set's input is off: PyTorch's own is the truth."""
    return 1.0 if type(it) is TorchOps else stretch


def _draws(bench: Bench, name: str, found: Ops) -> Row:
    """Compare draws of all parameters, by the same uniforms."""
    count, vocab_size = (6, 700) if bench.tiny else (256, 151936)
    logits = bench.random(count, vocab_size, dtype=torch.float32, seed=9) * 3
    drawn = Drawn(
        rows=bench.whole(list(range(count))),
        temperature=torch.full((count,), 0.8, device=bench.device),
        top_k=bench.whole([50 if row % 2 else vocab_size for row in range(count)]),
        top_p=torch.full((count,), 0.9, dtype=torch.float64, device=bench.device),
        uniforms=torch.linspace(0.01, 0.99, count, dtype=torch.float64).to(bench.device),
    )
    tokens = []
    for it in (found, TorchOps()):
        mine = logits.clone()
        best, _ = it.best(mine)
        tokens.append(it.draw(mine, best, drawn))
    unequal = float((tokens[0] != tokens[1]).double().mean())
    return compared("ops", f"{name}: draws that differ", unequal, UNEQUAL_DRAWS)
