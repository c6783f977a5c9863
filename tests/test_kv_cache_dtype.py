"""The type of keys and values: what `auto` stands for, what is refused, and how many tokens fit.

Owns the tests of --kv-cache-dtype through settings, runner and whole engines; what C++ computes
over a cache in int8 is tests/test_int8_cache.py's.
"""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.build import build
from engine.config import (
    ConfigError,
    DeviceFacts,
    EngineConfig,
    check_engine,
    kv_bytes_per_token,
    resolve,
)
from engine.spec import read_spec
from engine.weights import TORCH_DTYPES, attention_shape
from kernels.native import refusal
from kernels.native_ops import threads
from kernels.native_step import NativeBackend, NativeCache
from tests import tiny
from tests.simulation import Recorder
from tests.steps import load
from tests.test_equivalence import GREEDY, WallClock, engine, run, submits
from tests.test_per_request import IN_TILES

pytestmark = pytest.mark.usefixtures("one_thread")
needs_native = pytest.mark.skipif(refusal() is not None, reason=f"no C++: {refusal()}")
FACTS = DeviceFacts(device="cpu", auto_dtype="int8", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"), shape=IN_TILES)


@pytest.mark.parametrize(
    ("dtype", "asked", "given"),
    [
        ("f32", "auto", "f32"),
        ("f32", "f32", "f32"),
        ("bf16", "auto", "bf16"),
        ("bf16", "int8", "int8"),
        ("int8", "auto", "int8"),
        ("int8", "bf16", "bf16"),
        ("int4", "auto", "int8"),
        ("auto", "auto", "int8"),
    ],
)
def test_auto_is_int8_beside_weights_of_8_and_4_bits(
    model: Path, dtype: str, asked: str, given: str
) -> None:
    config = EngineConfig(model=str(model), dtype=dtype, kv_cache_dtype=asked)
    resolved = resolve(config, read_spec(str(model)), FACTS)
    assert resolved.kv_cache_dtype == given
    check_engine(resolved)


@pytest.mark.parametrize(
    ("dtype", "asked"), [("f32", "int8"), ("f32", "bf16"), ("bf16", "f32"), ("int8", "fp8")]
)
def test_a_type_that_none_computes_in_is_named(model: Path, dtype: str, asked: str) -> None:
    config = EngineConfig(model=str(model), dtype=dtype, kv_cache_dtype=asked)
    with pytest.raises(ConfigError, match=r"^--kv-cache-dtype \w+ ?.*$") as refused:
        resolve(config, read_spec(str(model)), FACTS)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_backend_that_keeps_no_int8_is_refused_in_one_line(model: Path, backend: str) -> None:
    asked = {"dtype": "bf16", "kv_cache_dtype": "int8", "attention_backend": backend}
    with pytest.raises(ConfigError, match="--kv-cache-dtype") as refused:
        load(model, **asked)
    assert "\n" not in str(refused.value)


@needs_native
@pytest.mark.parametrize("backend", ["native", "per_request"])
def test_weights_in_bf16_may_have_keys_in_int8(model: Path, backend: str) -> None:
    asked = {"dtype": "bf16", "kv_cache_dtype": "int8", "attention_backend": backend}
    logits = load(model, **asked).logits(list(range(5, 45)))
    plain = load(model, **(asked | {"kv_cache_dtype": "bf16"})).logits(list(range(5, 45)))
    assert 0 < (logits - plain).norm() / plain.norm() < 8e-2


@needs_native
def test_the_same_memory_holds_nearly_twice_the_tokens(model: Path) -> None:
    """What a block is said to take is what it takes."""
    spec, blocks = read_spec(str(model)), {}
    for kind in ("bf16", "int8"):
        config = EngineConfig(model=str(model), kv_cache_dtype=kind, kv_cache_memory=2**24)
        blocks[kind] = resolve(config, spec, FACTS).kv_blocks or 0
        cache = NativeBackend(threads()).allocate_kv(
            attention_shape(spec), 5, 32, TORCH_DTYPES[kind], "cpu"
        )
        assert isinstance(cache, NativeCache)
        assert cache.values.nbytes == 5 * 32 * kv_bytes_per_token(spec, kind)
    assert 1.7 < blocks["int8"] / blocks["bf16"] < 2


@needs_native
def test_the_run_says_which_type_serves(model: Path) -> None:
    config = EngineConfig(
        model=str(model), dtype="int8", engine_threads=1, kv_blocks=8, max_num_batched_tokens=64
    )
    _, told = build(
        config, emit=Recorder(), clock=WallClock(), progress=lambda stage, fraction: None
    )
    assert msgspec.json.decode(told.config)["kv_cache_dtype"] == "int8"


@needs_native
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24}, {"dtype": "bf16"}])
def test_what_a_preempted_sequence_says_is_what_it_would_have_said(
    model: Path, settings: dict[str, object]
) -> None:
    """Computed anew in chunks or decoded: each token is the best of a fresh pass, or as good."""
    chosen = {"dtype": "int8", "kv_cache_dtype": "int8", "attention_backend": "native"} | settings
    core, recorder = engine(model, kv_blocks=12, max_model_len=128, **chosen)
    asked = [
        msgspec.structs.replace(one, prompt=one.prompt[:20], max_tokens=40)
        for one in submits(GREEDY)
    ]
    told = run(core, recorder, asked)
    assert any(record.preempted for record in recorder.iterations)
    runner = load(model, **{name: chosen[name] for name in ("dtype", "kv_cache_dtype")})
    for submit in asked:
        assert len(told[submit.request]) == submit.max_tokens
        text = torch.tensor([*submit.prompt, *told[submit.request]])
        logits = runner.logits(text.tolist())[len(submit.prompt) - 1 : -1]
        said = logits.gather(1, text[len(submit.prompt) :, None])[:, 0]
        assert (logits.amax(-1) - said).max() / logits.abs().max() < 4e-2
