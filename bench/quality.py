"""What a precision costs in quality: perplexity of a shipped text, and agreement with float32.

Loads the engine's own runner in each dtype and scores the same windows of up to 512 tokens, step by
step as an engine computes them. A server tells the tokens, since text is its business. Prints a row
for each form: perplexity over float32's, the share of places with the same first choice, and the
mean KL divergence from float32 in nats. The rest of a perplexity is the text's and the model's.
"""

import argparse
import gzip
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from bench.machine import StolenTime, describe
from bench.whole_path import server
from engine.config import EngineConfig, resolve
from engine.device import device_facts
from engine.runner import ModelRunner
from engine.spec import read_spec

TEXTS = Path(__file__).parent / "data" / "quality.jsonl.gz"
WINDOW = 512
FORMS = ("f32", "bf16", "int8", "int8/3", "int4")
"""Dtypes; behind a stroke, how many tokens a step computes: few read their weights otherwise.

Behind a colon stands the type of keys and values, where it is not the one that serves by default.
"""
FEW_TOKENS = 8_000
"""How much of the text is scored in steps of a few tokens by default: that takes its time."""


@dataclass(slots=True)
class Score:
    """Sums over what one form has scored, and over what float32 made of the same."""

    loss: float = 0.0
    truth_loss: float = 0.0
    agreeing: int = 0
    divergence: float = 0.0
    tokens: int = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor, tokens: list[int]) -> None:
        """Count a text: its log-probabilities [T - 1, vocabulary] here and in float32."""
        expected = torch.tensor(tokens[1:])[:, None]
        self.loss -= float(ours.gather(1, expected).sum(dtype=torch.float64))
        self.truth_loss -= float(theirs.gather(1, expected).sum(dtype=torch.float64))
        self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.divergence += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
        self.tokens += len(expected)

    def told(self) -> dict[str, float]:
        """Return what is printed."""
        return {
            "perplexity": math.exp(self.loss / self.tokens),
            "perplexity_ratio": math.exp((self.loss - self.truth_loss) / self.tokens),
            "top1_agreement": self.agreeing / self.tokens,
            "kl_nats": self.divergence / self.tokens,
            "tokens": self.tokens,
        }


def windows(model: str, texts: int) -> list[list[int]]:
    """Return the texts as token ids, one behind the other, cut into windows."""
    lines = gzip.decompress(TEXTS.read_bytes()).decode().splitlines()[:texts]
    ids: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder), "--model", model) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for line in lines:
            answer = client.post("/tokenize", json={"prompt": json.loads(line)["text"]})
            ids += answer.raise_for_status().json()["tokens"]
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]


def runner(model: str, form: str) -> ModelRunner:
    """Return a runner with room for one window."""
    dtype, _, kv_dtype = form.partition("/")[0].partition(":")
    config = EngineConfig(
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_dtype or "auto",
        kv_blocks=64,
        max_num_batched_tokens=WINDOW,
    )
    spec = read_spec(model)
    resolved = resolve(config, spec, device_facts(config, spec))
    return ModelRunner.build(resolved, spec, lambda *_: None)


@torch.inference_mode()
def compare(
    model: str, forms: list[str], texts: list[list[int]], few_tokens: int
) -> dict[str, dict[str, float]]:
    """Return each form's perplexity, first choices that agree with float32's, and KL divergence."""
    truth = runner(model, "f32")
    runners = {form: runner(model, form) for form in forms}
    scores = {form: Score() for form in forms}
    for tokens in texts:
        theirs = truth.logits(tokens)[:-1].log_softmax(-1)
        for form, score in scores.items():
            rows = int(form.partition("/")[2] or 0)
            if not rows or score.tokens < few_tokens:
                ours = runners[form].logits(tokens, rows or None)[:-1].log_softmax(-1)
                score.add(ours, theirs, tokens)
    return {form: score.told() for form, score in scores.items()}


def main() -> int:
    """Score every dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default=None, help="a model file; the demo model by default")
    parser.add_argument(
        "--forms",
        nargs="*",
        default=FORMS,
        help="dtypes; int8/3: 3 rows a step; int8:bf16: keys and values in bf16",
    )
    parser.add_argument("--texts", type=int, default=1000, help="score only so many of them")
    parser.add_argument(
        "--few-tokens", type=int, default=FEW_TOKENS, help="most tokens scored in steps of few"
    )
    flags = parser.parse_args()
    model = flags.model or demo()
    with StolenTime() as stolen:
        texts = windows(model, flags.texts)
        found = compare(model, flags.forms, texts, flags.few_tokens)
    for form, one in found.items():
        print(
            f"{form:8} perplexity {one['perplexity']:.4f}  over f32 {one['perplexity_ratio']:.4f}"
            f"  same first choice {one['top1_agreement']:.3f}  KL {one['kl_nats']:.5f}"
            f"  {one['tokens']:.0f} tokens"
        )
    if flags.json:
        flags.json.write_text(json.dumps(found | describe(stolen), indent=1))
    return 0


def demo() -> str:
    """Return the demo model's file, which `make demo-model` has fetched."""
    found = sorted((Path.home() / ".cache" / "iterscope" / "models").glob("*.gguf"))
    if not found:
        raise SystemExit("no demo model here: make demo-model")
    return str(found[0])


if __name__ == "__main__":
    sys.exit(main())
