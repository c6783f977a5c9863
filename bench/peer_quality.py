"""What every peer's precision costs: the perplexity of the same text, over our own float32's.

Windows of up to 512 tokens of the text that bench/quality.py scores; each engine of a list
(bench/peers.toml) tells the log-probability of every token, in process or as OpenAI's completions
do (`echo` with `logprobs`). One engine runs at a time. A server that does not tell is named so.

    python -m bench.peer_quality bench/peers.toml --at ~/peers --side process
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.drive import SCORE
from bench.peer import SIDES, Peer, Running, chosen, read
from bench.quality import runner, windows
from bench.workload import DEMO_MODEL
from engine.runner import ModelRunner


def main() -> int:
    """Score the peers, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path, help="whom to score, TOML")
    parser.add_argument("--at", type=Path, default=Path(), help="the others' folder")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="what float32 is taken of")
    parser.add_argument("--side", choices=SIDES, default=SIDES[0])
    parser.add_argument("--only", nargs="*", default=[], help="peers whose names hold one of these")
    parser.add_argument("--texts", type=int, default=1000, help="score only so many of them")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as fresh:
        places = {"at": str(flags.at.absolute()), "model": str(flags.model), "fresh": fresh}
        listed = read(flags.list, places | {"python": sys.executable})
        peers = chosen(listed, flags.side, flags.only)
        texts = windows(str(flags.model), flags.texts)
        (file := Path(fresh) / "texts.json").write_text(json.dumps(texts))
        truth = loss_of(runner(str(flags.model), "f32"), texts)
        print("| | precision | perplexity over float32's | tokens |\n|---|---|--:|--:|")
        found = {}
        for peer in peers:
            found[peer.name] = one = scored(peer, file, Path(fresh) / "log")
            told = f"{one['error']} |" if "error" in one else perplexity(one, truth)
            print(f"| {peer.name} | {peer.precision} | {told} |", flush=True)
    if flags.json:
        flags.json.write_text(json.dumps({"float32_nats": truth, "peers": found}, indent=1))
    return 0


@torch.inference_mode()
def loss_of(runner: ModelRunner, texts: list[list[int]]) -> float:
    """Return the loss of our own logits on the texts, in nats."""
    loss = 0.0
    for ids in texts:
        told = runner.logits(ids)[:-1].log_softmax(-1)
        loss -= float(told.gather(1, torch.tensor(ids[1:])[:, None]).sum(dtype=torch.float64))
    return loss


def scored(peer: Peer, texts: Path, log: Path) -> dict[str, Any]:
    """Return the loss that an engine tells of the texts, or why it tells none."""
    running = Running.start(peer, log)
    try:
        running.answer()
        return running.run(f"{SCORE}:{texts}")
    except SystemExit as error:
        return {"error": str(error)}
    finally:
        running.stop()


def perplexity(one: dict[str, Any], truth: float) -> str:
    """Return the cells of a score: its perplexity over float32's, and on how many tokens."""
    return f"{math.exp((one['loss_nats'] - truth) / one['tokens']):.4f} | {one['tokens']:,}"


if __name__ == "__main__":
    sys.exit(main())
