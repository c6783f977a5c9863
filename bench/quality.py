"""What a precision costs in quality: perplexity of a shipped text, and agreement with float32.

Loads the engine's own runner in each dtype and scores the same windows of up to 512 tokens, step by
step as an engine computes them. A server tells the tokens, since text is its business. Prints a row
for each dtype: perplexity over float32's, the share of places with the same first choice, and the
mean KL divergence from float32 in nats. The rest of a perplexity is the text's and the model's.
"""

import argparse
import gzip
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

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
DTYPES = ("f32", "bf16", "int8")


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


def runner(model: str, dtype: str) -> ModelRunner:
    """Return a runner with room for one window."""
    config = EngineConfig(model=model, dtype=dtype, kv_blocks=64, max_num_batched_tokens=WINDOW)
    spec = read_spec(model)
    resolved = resolve(config, spec, device_facts(config, spec))
    return ModelRunner.build(resolved, spec, lambda *_: None)


@torch.inference_mode()
def compare(
    scored: ModelRunner, truth: ModelRunner, texts: list[list[int]], rows: int | None
) -> dict[str, float]:
    """Return perplexity, first choices that agree with float32's, and KL divergence from it.

    `rows` tokens a step are scored, for None a text at once: steps of few rows read their weights
    in another form.
    """
    loss = agreeing = divergence = places = 0.0
    for tokens in texts:
        expected = torch.tensor(tokens[1:])
        ours = scored.logits(tokens, rows)[:-1].log_softmax(-1)
        theirs = truth.logits(tokens)[:-1].log_softmax(-1)
        loss -= float(ours.gather(1, expected[:, None]).sum(dtype=torch.float64))
        agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        divergence += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
        places += len(expected)
    return {
        "perplexity": math.exp(loss / places),
        "top1_agreement": agreeing / places,
        "kl_nats": divergence / places,
        "tokens": places,
    }


def main() -> int:
    """Score every dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default=None, help="a model file; the demo model by default")
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--texts", type=int, default=1000, help="score only so many of them")
    parser.add_argument("--rows", type=int, help="tokens a step; the text at once by default")
    flags = parser.parse_args()
    model = flags.model or demo()
    found: dict[str, dict[str, Any]] = {}
    with StolenTime() as stolen:
        texts = windows(model, flags.texts)
        truth = runner(model, "f32")
        for dtype in flags.dtypes:
            one = found[dtype] = compare(runner(model, dtype), truth, texts, flags.rows)
            if "f32" in found:
                one["perplexity_ratio"] = one["perplexity"] / found["f32"]["perplexity"]
            print(
                f"{dtype:6} perplexity {one['perplexity']:.4f}  over f32 "
                f"{one.get('perplexity_ratio', math.nan):.4f}  same first choice "
                f"{one['top1_agreement']:.3f}  KL {one['kl_nats']:.5f}  {one['tokens']:.0f} tokens",
                flush=True,
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
