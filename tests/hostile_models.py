"""Model files that nobody vouches for: sound ones broken at random, read as a start reads them.

Owns the mutations of GGUF files, safetensors files and the JSON beside them, of every family, and
the run over many:
`python -m tests.hostile_models SEED COUNT FOLDER` reads COUNT of each kind in this process and
prints what happened as JSON. test_hostile_models.py runs it, so that a crash or a hang is seen.
"""

import json
import random
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.config import ConfigError, DeviceFacts, EngineConfig, resolve
from engine.spec import SpecError, read_spec, read_tokenizer_metadata
from engine.tensors import check_tensors
from engine.weights import load_weights
from kernels.ops import TorchOps
from server.tokenizer import build_tokenizer
from server.tokenizer_trial import try_tokenizer
from tests import families, tiny
from tests.test_shards import FIRST, SECOND, split

SIZES = (0, 1, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 3, 2**31, 2**53, 2**63, -(2**63), 1e308, -0.5, float("nan"), float("inf")),
    *("", "x", "\x00", "../../etc/passwd", "F64", "llama", "x" * 5000),
    *(None, True, False, [], [[]], {}, {"a": {"b": []}}, [-1, 2**64], ["F32"]),
    *(1e-30, 1e30, 1e-308, 2**24, "gemma3_text", "qwen2", "gelu_pytorch_tanh"),
    *("yarn", "linear", "llama3", "sliding_attention", ["sliding_attention"] * 4, [True] * 4),
)


def load(path: Path, *, tried: bool = True) -> None:
    """Do what a start does with a model's files, the engine's part included.

    A tokenizer that was not `tried` is, in a process of its own; that takes a third of a second.
    """
    spec = read_spec(str(path))
    check_tensors(spec)
    if not tried:
        try_tokenizer(str(path))
    build_tokenizer(read_tokenizer_metadata(str(path)))
    facts = DeviceFacts(device="cpu", auto_dtype="f32", threads=1)
    config = resolve(EngineConfig(model=str(path)), spec, facts)
    assert config.max_model_len is not None
    load_weights(
        spec,
        dtype="f32",
        device="cpu",
        positions=config.max_model_len,
        pack=TorchOps().pack,
        progress=lambda stage, fraction: None,
    )


def noise(raw: bytes, length: int, draw: random.Random) -> bytes:
    """Break the first `length` bytes: bits, sizes, pieces that lack or come twice, an early end."""
    damaged = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.randrange(min(length, len(damaged)))
        match draw.randrange(6):
            case 0:
                damaged[place] ^= 1 << draw.randrange(8)
            case 1:
                damaged[place : place + 8] = struct.pack("<Q", draw.choice(SIZES))
            case 2:
                damaged[place : place + 4] = struct.pack("<I", draw.choice(SIZES[:7]))
            case 3:
                del damaged[place : place + draw.choice((1, 4, 8, 64))]
            case 4:
                damaged[place:place] = damaged[place : place + draw.choice((1, 8, 64))]
            case 5:
                if draw.random() < 0.2:
                    del damaged[place:]
        if not damaged:
            return b""
    return bytes(damaged)


def spoil(content: Any, draw: random.Random) -> Any:
    """Change one place of a JSON value: another value, another name, or nothing."""
    if isinstance(content, dict) and content and draw.random() < 0.9:
        key = draw.choice(list(content))
        match draw.randrange(8):
            case 0:
                return {name: value for name, value in content.items() if name != key}
            case 1:
                return content | {draw.choice(("x", "", key + "0", "__metadata__")): content[key]}
            case _:
                return content | {key: spoil(content[key], draw)}
    if isinstance(content, list) and content and draw.random() < 0.7:
        place = draw.randrange(len(content))
        return [*content[:place], spoil(content[place], draw), *content[place + 1 :]]
    return draw.choice(VALUES)


FAMILIES = (
    *("llama with biases", "mistral", "qwen2 with windows", "qwen3 with biases and yarn"),
    *("gemma2", "gemma3, linear rope"),
)


class Kinds:
    """The sound files, and one way of breaking each."""

    def __init__(self, folder: Path) -> None:
        self.gguf = tiny.write_gguf(folder / "tiny.gguf")
        self.folder = tiny.write(folder / "tiny")
        self.shards = split(tiny.write(folder / "shards")).parent
        models = [families.oracle(name) for name in FAMILIES]
        self.families = [
            families.write(folder / f"family{place}", one) for place, one in enumerate(models)
        ]
        self.family_ggufs = [
            families.write_gguf(folder / f"family{place}.gguf", one)
            for place, one in enumerate(models)
        ]
        self.whole = (self.gguf, self.folder, self.shards, *self.families, *self.family_ggufs)
        self.sound = {file: file.read_bytes() for file in folder.glob("**/*") if file.is_file()}
        self.broken: set[Path] = set()
        self.weights = self.folder / "model.safetensors"
        (self.header_bytes,) = struct.unpack("<Q", self.sound[self.weights][:8])

    def restore(self) -> None:
        for file in self.broken:
            file.write_bytes(self.sound[file])
        self.broken.clear()
        (self.folder / "model.safetensors.index.json").unlink(missing_ok=True)

    def write(self, file: Path, raw: bytes) -> None:
        self.broken.add(file)
        file.write_bytes(raw)

    def spoil_json(self, file: Path, draw: random.Random) -> None:
        content = json.loads(self.sound[file])
        for _ in range(draw.choice((1, 1, 2))):
            content = spoil(content, draw)
        self.write(file, json.dumps(content).encode())

    def tokenizer_is_sound(self) -> bool:
        file = self.folder / "tokenizer.json"
        return file.read_bytes() == self.sound[file]

    def gguf_header(self, draw: random.Random) -> Path:
        raw = self.sound[self.gguf]
        self.write(self.gguf, noise(raw, 12_000 if draw.random() < 0.9 else len(raw), draw))
        return self.gguf

    def family_gguf(self, draw: random.Random) -> Path:
        file = draw.choice(self.family_ggufs)
        self.write(file, noise(self.sound[file], draw.choice((900, 900, 12_000)), draw))
        return file

    def family_json(self, draw: random.Random) -> Path:
        folder = draw.choice(self.families)
        self.spoil_json(folder / "config.json", draw)
        return folder

    def shard(self, draw: random.Random) -> Path:
        """Break the index of shards, or what a shard says of itself."""
        if draw.random() < 0.5:
            self.spoil_json(self.shards / "model.safetensors.index.json", draw)
        else:
            file = self.shards / draw.choice((FIRST, SECOND))
            self.write(file, noise(self.sound[file], 4000, draw))
        return self.shards

    def safetensors_bytes(self, draw: random.Random) -> Path:
        raw = self.sound[self.weights]
        self.write(self.weights, noise(raw, 8 + self.header_bytes, draw))
        return self.folder

    def safetensors_header(self, draw: random.Random) -> Path:
        raw = self.sound[self.weights]
        header = json.loads(raw[8 : 8 + self.header_bytes])
        for _ in range(draw.choice((1, 1, 3))):
            header = spoil(header, draw)
        made = json.dumps(header).encode()
        values = raw[8 + self.header_bytes :]
        self.write(self.weights, struct.pack("<Q", len(made)) + made + values)
        return self.folder

    def json_file(self, draw: random.Random) -> Path:
        names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
        file = self.folder / draw.choice(names)
        if draw.random() < 0.3:
            self.write(file, noise(self.sound[file], len(self.sound[file]), draw))
        else:
            self.spoil_json(file, draw)
        return self.folder

    def index(self, draw: random.Random) -> Path:
        names = draw.choices(("model.safetensors", "absent.safetensors", "../x", "", "."), k=2)
        content: Any = {"weight_map": dict(zip(("a", "b"), names, strict=True))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(spoil(content, draw)))
        return self.folder


def run(seed: int, count: int, folder: Path) -> dict[str, Any]:
    """Read `count` broken models of each kind; return tallies, the slowest, and what went wrong."""
    torch.set_num_threads(1)
    kinds = Kinds(folder)
    ways: dict[str, Callable[[random.Random], Path]] = {
        "gguf header": kinds.gguf_header,
        "safetensors bytes": kinds.safetensors_bytes,
        "safetensors header": kinds.safetensors_header,
        "json": kinds.json_file,
        "index": kinds.index,
        "family gguf": kinds.family_gguf,
        "family json": kinds.family_json,
        "shards": kinds.shard,
    }
    for sound in kinds.whole:
        load(sound)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tallies: Counter[str] = Counter()
    wrong: list[str] = []
    slowest = 0.0
    for number in range(count):
        for name, way in ways.items():
            path = way(random.Random(f"{seed} {name} {number}"))
            began = time.process_time()
            outcome = outcome_of(path, tried=kinds.tokenizer_is_sound())
            slowest = max(slowest, time.process_time() - began)
            tallies[f"{name}: {outcome if outcome in ('taken', 'refused') else 'wrong'}"] += 1
            if outcome not in ("taken", "refused"):
                wrong.append(f"{name} {number}: {outcome}")
            kinds.restore()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"tallies": tallies, "wrong": wrong, "slowest_s": slowest, "grown_mb": grown / 1024}


def outcome_of(path: Path, *, tried: bool) -> str:
    """Return taken, refused, or what should not have happened."""
    try:
        load(path, tried=tried)
    except (SpecError, ConfigError) as error:
        line = str(error)
        return "refused" if "\n" not in line and len(line) < 600 else f"no one line: {line[:900]}"
    except BaseException as error:  # noqa: BLE001  a panic of a Rust library is no Exception
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "taken"


if __name__ == "__main__":
    seed, count, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(run(int(seed), int(count), Path(folder))))
