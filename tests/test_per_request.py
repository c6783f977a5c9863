"""One attention call a request computes what one for all rows does, through whole engines too.

Owns the tests of kernels/per_request.py: the lab's selective batching, on a CPU. A step in C++
rounds elsewhere than layer by layer: int8's engines are compared by their attention.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import select
from kernels.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    BackendError,
    Cache,
    Prepared,
)
from kernels.per_request import PerRequestBackend
from kernels.sdpa import SdpaBackend
from tests import tiny
from tests.steps import Hand, load
from tests.test_kernels import MIXED, TOLERANCE, batch_of, packed, scene

IN_TILES = tiny.Shape(hidden=96, heads=6, head_dim=32)
"""Sizes that C++ computes."""

SHAPE = AttentionShape(layers=1, heads=6, kv_heads=2, head_dim=32)


pytestmark = pytest.mark.usefixtures("one_thread")


def attended(backend: AttentionBackend) -> torch.Tensor:
    drawn = scene(MIXED, SHAPE)
    cache = backend.allocate_kv(SHAPE, drawn.blocks, 16, torch.float32, "cpu")
    spans = [(context - count, context) for context, count in drawn.rows]
    for steps in ([(0, max(1, first)) for first, _ in spans], spans):
        tokens = sum(stop - start for start, stop in steps)
        q = drawn.q if steps is spans else torch.ones(tokens, 6, 32)
        k, v = packed(drawn.keys, steps), packed(drawn.values, steps)
        out = backend.attend(0, q, k, v, cache, backend.prepare(batch_of(drawn, steps), cache))
    return out


def test_rows_alone_are_rows_together() -> None:
    alone = PerRequestBackend(lambda *_: SdpaBackend())
    assert torch.allclose(attended(alone), attended(SdpaBackend()), atol=1e-6, rtol=0)


class Counting(SdpaBackend):
    """Notes how many rows each call has."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        self.calls.append(len(batch.query_lengths_host))
        return super().prepare(batch, cache)


def test_there_is_a_call_for_each_request() -> None:
    inner = Counting()
    attended(PerRequestBackend(lambda *_: inner))
    assert inner.calls == [1] * 2 * len(MIXED)


def test_it_is_taken_by_name_alone() -> None:
    asked = select.choose("per_request", SHAPE, device="cpu", dtype=torch.float32, block_tokens=16)
    assert asked.backend.name == "per_request"
    usual = select.choose("auto", SHAPE, device="cpu", dtype=torch.float32, block_tokens=16)
    assert usual.backend.name == "sdpa"


def test_it_refuses_what_no_backend_serves() -> None:
    def nobody(*_: object) -> AttentionBackend:
        raise BackendError("attention backend 'auto' cannot serve")

    refusal = PerRequestBackend(nobody).supports(SHAPE, "cpu", torch.float32, 16)
    assert refusal == "attention backend 'auto' cannot serve"


def test_a_model_that_nobody_serves_is_refused_once_by_each() -> None:
    """`auto` once asked it, which asked `auto`: a refusal of a hundred thousand letters."""
    windowed = replace(SHAPE, windows=(16,))
    for name in ("auto", "per_request"):
        with pytest.raises(BackendError) as refused:
            select.choose(name, windowed, device="cpu", dtype=torch.int8, block_tokens=16)
        assert str(refused.value).count("sdpa") == 1, name
        assert "recursion" not in str(refused.value)


def test_an_engine_says_the_same_with_it(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    prompts = [[5 + (7 * row + 3 * at * at) % 310 for at in range(4 + 9 * row)] for row in range(4)]
    outputs = []
    for name in ("sdpa", "per_request"):
        runner = load(model, attention_backend=name)
        assert runner.backend == name
        hand = Hand(runner)
        rows = [hand.add(prompt, 12) for prompt in prompts]
        hand.finish(*rows, outputs=12)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


def test_rows_alone_are_rows_together_in_cpp() -> None:
    """int8's attention, whose inner backend is C++."""
    asked = {"device": "cpu", "dtype": torch.int8, "block_tokens": 16}
    alone = select.choose("per_request", SHAPE, **asked).backend
    together = select.choose("native", SHAPE, **asked).backend
    assert torch.allclose(
        attended(alone), attended(together), atol=TOLERANCE[torch.bfloat16], rtol=0
    )


def test_an_engine_of_int8_serves_with_it(tmp_path: Path) -> None:
    runner = load(
        tiny.write(tmp_path / "model", shape=IN_TILES),
        attention_backend="per_request",
        dtype="int8",
    )
    hand = Hand(runner)
    rows = [hand.add([5, 9, 100 + row], 8) for row in range(3)]
    hand.finish(*rows, outputs=8)
    assert all(len(row.output) == 8 for row in rows)
