"""Every family against transformers: the same logits and the same text, however it is computed.

Owns the oracle tests of tests/families.py's models: prefill, chunked prefill and decode over pages
past the window, from folders and from GGUF files, and the real runner's greedy text.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.spec import read_spec
from kernels.base import AttentionBackend
from kernels.reference import ReferenceBackend
from kernels.sdpa import SdpaBackend
from tests import families
from tests.api import complete
from tests.oracle import Part, logits_in_steps, logits_of
from tests.servers import serving
from tests.steps import Hand, load

ROWS = [[3 + (7 * index + index * index) % 310 for index in range(count)] for count in (61, 37)]
"""Texts of five and three windows."""

WHOLE = [[Part(0, 61), Part(1, 37)]]
CHUNKED = [
    *([Part(0, 7)], [Part(0, 20), Part(1, 5)], [Part(0, 1), Part(1, 30)]),
    *([Part(0, 30), Part(1, 1)], [Part(0, 1), Part(1, 1)], [Part(0, 2)]),
]
DECODED = [[Part(0, 20), Part(1, 10)], *[[Part(0, 1), Part(1, 1)]] * 27, *[[Part(0, 1)]] * 14]
TOLERANCE = 2e-4

NOT_IN_GGUF = ("qwen2 with windows", "qwen3 with windows", "gemma2 without caps")
"""llama.cpp knows no windows of Qwen, and every Gemma 2 has caps there."""


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def expected_of(model: Any) -> list[torch.Tensor]:
    return [model(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("name", families.MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = families.oracle(name)
    folder = families.write(tmp_path / "model", model)
    expected = expected_of(model)
    assert expected[0].std() > 0.3, "logits that hardly differ test nothing"
    backends: tuple[AttentionBackend, ...] = (SdpaBackend(), ReferenceBackend())
    for steps in (WHOLE, CHUNKED, DECODED):
        for backend in backends:
            assert worst(logits_in_steps(folder, ROWS, steps, backend), expected) < TOLERANCE
    file = families.write_gguf(tmp_path / "model.gguf", model)
    if name not in NOT_IN_GGUF:
        found = logits_in_steps(file, ROWS, CHUNKED, SdpaBackend())
        assert worst(found, expected) < TOLERANCE
    spec, other = read_spec(str(folder)), read_spec(str(file))
    counted = sum(weight.numel() for weight in model.parameters())
    assert (spec.parameters, other.parameters) == (counted, counted)


@torch.inference_mode()
def test_the_runners_text_is_that_of_transformers(tmp_path: Path) -> None:
    """Greedy, two rows at a time, in chunks, past the window: what a server would say."""
    for name in ("mistral", "qwen2", "qwen3 with windows", "gemma2", "gemma3"):
        model = families.oracle(name)
        hand = Hand(load(families.write(tmp_path / name, model), max_model_len=512))
        assert hand.runner.backend == "sdpa", name
        assert hand.runner.refusals["native"], name
        rows = [hand.add(row, 24) for row in ROWS]
        hand.finish(*rows, outputs=24, chunk=9)
        for row, prompt in zip(rows, ROWS, strict=True):
            text = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert row.tokens == text[0].tolist(), name


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_bf16_is_near_f32(tmp_path: Path, name: str) -> None:
    folder = families.write(tmp_path / "model", families.oracle(name))
    exact, rough = logits_of(folder, ROWS[0]), logits_of(folder, ROWS[0], "bf16")
    assert 0 < (exact - rough).abs().mean() < 0.03 * exact.std()


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_a_server_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Gemma from a GGUF with SentencePiece's lists, Qwen from a folder; text in, text out."""
    model = families.oracle(name)
    if name == "gemma3":
        place = families.write_gguf(tmp_path / "model.gguf", model)
    else:
        place = families.write(tmp_path / "model", model)
    with serving(
        tmp_path, place, "--max-num-batched-tokens", "16", "--max-num-seqs", "8"
    ) as server:
        asked = {
            "prompt": "A request waits, runs, is preempted, runs again and is finished.",
            "max_tokens": 20,
        }
        answer = complete(server, asked | {"ignore_eos": True})["choices"][0]
    prompt = answer["prompt_token_ids"]
    assert len(prompt) > 2 * families.WINDOW
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert prompt + answer["token_ids"] == text[0].tolist()
