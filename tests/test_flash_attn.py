"""The adapter to flash-attn: called as its source says, and right if the package is.

Owns a stand-in with the package's own signatures, computed by the oracle, since the package builds
and runs on a GPU alone. Nothing here shows that flash-attn itself is right.
"""

import ast
import inspect
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import DeviceFacts, EngineConfig, resolve
from engine.spec import read_spec
from kernels import select
from kernels.base import AttentionShape
from kernels.flash_attn import FlashAttnBackend
from kernels.reference import ReferenceBackend, attend_row
from server.cli import main
from tests import tiny
from tests.test_kernels import Scene, batch_of, packed, scene

ROOT = Path(__file__).resolve().parent.parent
CALLED = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
ROWS = {
    "decode": [(1, 1), (300, 1), (257, 1)],
    "mixed": [(1, 1), (300, 1), (40, 40), (530, 20), (256, 2)],
}


def signatures() -> dict[str, inspect.Signature]:
    """Return the signatures in the package's source, without running any of it."""
    text = (ROOT / "tests" / "data" / "flash_attn_signatures.txt").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            given = node.args.args
            required = len(given) - len(node.args.defaults)
            found[node.name] = inspect.Signature(
                inspect.Parameter(
                    item.arg,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty
                    if place < required
                    else ast.literal_eval(node.args.defaults[place - required]),
                )
                for place, item in enumerate(given)
            )
    return found


@pytest.mark.parametrize("name", CALLED)
def test_we_call_it_as_its_source_says(name: str) -> None:
    tree = ast.parse((ROOT / "kernels" / "flash_attn.py").read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    ]
    assert len(calls) == 1
    (call,) = calls
    names = [item.arg for item in call.keywords]
    assert None not in names, "unpacked arguments hide what is called"
    signatures()[name].bind(*call.args, **{str(one): None for one in names})
    assert "causal" in names
    assert "block_table" in names


@dataclass(frozen=True)
class StandIn:
    """flash-attn's two functions over the oracle; like them it reads every page that a row has."""

    __version__: str = "2.8.3.post2"

    def flash_attn_varlen_func(self, *tensors: Any, **settings: Any) -> Any:
        given = bound("flash_attn_varlen_func", tensors, settings)
        starts, ends = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
        assert given["max_seqlen_q"] >= max(b - a for a, b in pairwise(starts))
        assert given["max_seqlen_k"] >= max(b - a for a, b in pairwise(ends))
        rows = [
            row_of(
                given, given["k"], given["v"], given["q"][starts[row] : starts[row + 1]], row, end
            )
            for row, end in enumerate(b - a for a, b in pairwise(ends))
        ]
        return torch.cat(rows)

    def flash_attn_with_kvcache(self, *tensors: Any, **settings: Any) -> Any:
        given = bound("flash_attn_with_kvcache", tensors, settings)
        assert given["k"] is None
        contexts = given["cache_seqlens"].tolist()
        rows = [
            row_of(given, given["k_cache"], given["v_cache"], given["q"][row], row, context)
            for row, context in enumerate(contexts)
        ]
        return torch.stack(rows)


def bound(name: str, tensors: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    found = signatures()[name].bind(*tensors, **settings)
    found.apply_defaults()
    assert found.arguments["causal"] is True
    return found.arguments


def row_of(
    given: dict[str, Any],
    keys: torch.Tensor,
    values: torch.Tensor,
    q: torch.Tensor,
    row: int,
    context: int,
) -> torch.Tensor:
    """Attend one row, bottom-right aligned, as the package's text says of these settings."""
    page = keys.shape[1]
    assert page % 256 == 0
    blocks = given["block_table"][row, : -(-context // page)].long()
    k, v = keys[blocks].flatten(0, 1), values[blocks].flatten(0, 1)
    poison = 0 * v[context:].sum()  # what is masked is multiplied by 0 all the same
    left, right = given["window_size"]
    assert right in (-1, 0)
    shape = AttentionShape(
        layers=1,
        heads=q.shape[1],
        kv_heads=keys.shape[2],
        head_dim=q.shape[2],
        windows=(left + 1,) if left >= 0 else (),
        scale=given["softmax_scale"],
        cap=given["softcap"] or None,
    )
    return attend_row(q, k[:context], v[:context], shape, 0) + poison.to(q.dtype)


def attended(
    backend: FlashAttnBackend | ReferenceBackend, drawn: Scene, shape: AttentionShape
) -> torch.Tensor:
    cache = backend.allocate_kv(shape, drawn.blocks, 256, torch.float32, "cpu")
    spans = [(context - count, context) for context, count in drawn.rows]
    for steps in ([(0, max(1, first)) for first, _ in spans], spans):
        counts = [stop - start for start, stop in steps]
        q = drawn.q if steps is spans else torch.ones(sum(counts), *drawn.q.shape[1:])
        k, v = packed(drawn.keys, steps), packed(drawn.values, steps)
        out = backend.attend(1, q, k, v, cache, backend.prepare(batch_of(drawn, steps), cache))
    return out


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("values", [{}, {"windows": (0, 37), "cap": 3.0, "scale": 0.3}])
def test_steps_become_the_calls_they_should(
    rows: list[tuple[int, int]], values: dict[str, Any]
) -> None:
    shape = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=32, **values)
    drawn = scene(rows, shape, block_tokens=256)
    found = attended(FlashAttnBackend(StandIn()), drawn, shape)
    expected = attended(ReferenceBackend(), drawn, shape)
    assert torch.allclose(found, expected, atol=1e-6, rtol=0)


def test_a_launch_depends_on_a_steps_shape_alone() -> None:
    shape = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=32)
    backend = FlashAttnBackend(StandIn())
    cache = backend.allocate_kv(shape, 3, 256, torch.bfloat16, "cpu")

    def key(rows: list[tuple[int, int]]) -> tuple[int, ...]:
        drawn = scene(rows, shape, block_tokens=256)
        spans = [(context - count, context) for context, count in rows]
        return backend.launch_key(batch_of(drawn, spans), cache)

    assert key([(10, 1), (250, 1)]) == key([(99, 1), (1, 1)])
    others = [[(10, 1)], [(10, 2), (9, 1)], [(10, 1), (257, 1)]]
    assert all(key(rows) != key([(10, 1), (250, 1)]) for rows in others)


def test_what_it_cannot_do_it_says() -> None:
    shape, backend = (
        AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=64),
        FlashAttnBackend(StandIn()),
    )
    old = FlashAttnBackend(StandIn("2.7.4"))
    assert old.supports(shape, "cuda", torch.bfloat16, 256) == "flash-attn 2.7.4 is not 2.8.x"
    assert backend.supports(shape, "cpu", torch.bfloat16, 256) == "runs on CUDA, not on cpu"
    assert "f32" in str(backend.supports(shape, "cuda", torch.float32, 256))
    assert "blocks of 16 tokens" in str(backend.supports(shape, "cuda", torch.bfloat16, 16))
    wide = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=512)
    assert "512" in str(backend.supports(wide, "cuda", torch.bfloat16, 256))


def test_on_a_cpu_nothing_of_a_gpus_is_loaded() -> None:
    shape = AttentionShape(layers=1, heads=4, kv_heads=2, head_dim=64)
    chosen = select.choose("auto", shape, device="cpu", dtype=torch.float32, block_tokens=256)
    for name in ("flash_attn", "triton", "triton ops"):
        assert chosen.refusals[name] == "runs on CUDA, not on cpu"


def test_block_size_auto_is_what_the_device_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(tmp_path / "model")
    spec = read_spec(str(tmp_path / "model"))
    for tokens in (16, 256):
        facts = DeviceFacts(device="cpu", auto_dtype="f32", threads=1, block_tokens=tokens)
        assert resolve(EngineConfig(block_size=0), spec, facts).block_size == tokens
        assert resolve(EngineConfig(block_size=32), spec, facts).block_size == 32
    assert main(["serve", "--block-size", "auto", "--print-config"]) == 0
    assert "\nblock_size = 0\n" in capsys.readouterr().out
