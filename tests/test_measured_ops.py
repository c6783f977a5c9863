"""Which ops multiply a weight, by measurement: what is kept, when it is believed, what follows.

Owns the tests of kernels/measured.py and engine/kernel_table.py. No speed is asserted: rates are
written into the file, and it is seen who serves then.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import kernel_table
from engine.config import DeviceFacts, EngineConfig, resolve
from engine.kernel_table import FILES_MAX, fitted, shapes_of
from engine.spec import ModelSpec, read_spec
from engine.weights import attention_shape
from kernels import measured
from kernels.measured import ROWS, MeasuredOps, fastest, measure
from kernels.ops import OneDnnOps, TorchOps
from kernels.select import Choice, choose, serving
from tests import tiny


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineConfig, ModelSpec]:
    """Return settings without a C++ step, of weights too small to be measured but for this."""
    monkeypatch.setattr(kernel_table, "VALUES_MIN", 0)
    monkeypatch.setattr(measured, "AGREE", math.inf)
    spec = read_spec(str(tiny.write(tmp_path / "model")))
    config = EngineConfig(
        model=spec.path,
        packed_cache=str(tmp_path / "kept"),
        dtype="f32",
        attention_backend="sdpa",
        kv_blocks=8,
    )
    return resolve(config, spec, DeviceFacts(device="cpu", auto_dtype="f32", threads=1)), spec


def chosen(config: EngineConfig, spec: ModelSpec) -> Choice:
    tokens, dtype = config.block_size or 16, torch.float32
    return choose("sdpa", attention_shape(spec), device="cpu", dtype=dtype, block_tokens=tokens)


def kept(config: EngineConfig) -> Path:
    (path,) = Path(str(config.packed_cache)).glob("*.rates")
    return path


def test_rates_are_kept_and_followed(asked: tuple[EngineConfig, ModelSpec]) -> None:
    config, spec = asked
    choice = chosen(config, spec)
    fitted(choice, config, spec)
    path = kept(config)
    rates = json.loads(path.read_text())
    assert len(rates) == len(shapes_of(spec))
    assert all(len(rate) == len(ROWS) for found in rates.values() for rate in found.values())
    for found in rates.values():
        found |= {"torch": [9e9] * len(ROWS), "onednn": [1.0] * len(ROWS)}
    path.write_text(json.dumps(rates))
    assert type(fitted(choice, config, spec).ops) is TorchOps, "the file was read"
    first = next(iter(rates))
    rates[first]["onednn"] = [9e10] * len(ROWS)
    path.write_text(json.dumps(rates))
    assert isinstance(fitted(choice, config, spec).ops, MeasuredOps)


def test_what_a_busy_machine_gave_is_not_kept(
    asked: tuple[EngineConfig, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, spec = asked
    monkeypatch.setattr(measured, "AGREE", 0.0)
    monkeypatch.setattr(measured, "BUDGET_S", 0.0)
    fitted(chosen(config, spec), config, spec)
    assert not list(Path(str(config.packed_cache)).glob("*.rates"))


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": 1}', "null", "x" * 2**21])
def test_a_damaged_file_is_measured_anew(
    asked: tuple[EngineConfig, ModelSpec], content: str
) -> None:
    config, spec = asked
    choice = chosen(config, spec)
    fitted(choice, config, spec)
    sound = json.loads(kept(config).read_text())
    kept(config).write_text(content)
    fitted(choice, config, spec)
    assert json.loads(kept(config).read_text()).keys() == sound.keys()


def test_rates_that_are_no_rates_are_not_believed(asked: tuple[EngineConfig, ModelSpec]) -> None:
    config, spec = asked
    choice = chosen(config, spec)
    fitted(choice, config, spec)
    rates = json.loads(kept(config).read_text())
    for wrong in (float("nan"), -1.0, "fast"):
        for found in rates.values():
            found["torch"] = [wrong] * len(ROWS)
        kept(config).write_text(json.dumps(rates))
        fitted(choice, config, spec)
        assert all(
            isinstance(rate, float) and rate > 0
            for found in json.loads(kept(config).read_text()).values()
            for rate in found["torch"]
        )


def test_files_are_few_and_without_a_folder_the_table_stands(
    asked: tuple[EngineConfig, ModelSpec],
) -> None:
    config, spec = asked
    choice = chosen(config, spec)
    nowhere = replace(config, packed_cache=None)
    assert fitted(choice, nowhere, spec) is choice
    folder = Path(str(config.packed_cache))
    folder.mkdir(mode=0o700)
    for number in range(FILES_MAX + 5):
        (folder / f"{number}.rates").write_text("{}")
    fitted(choice, config, spec)
    assert len(list(folder.glob("*.rates"))) == FILES_MAX


@torch.inference_mode()
def test_each_weight_is_multiplied_by_its_fastest() -> None:
    candidates = {"onednn": OneDnnOps(), "torch": TorchOps()}
    shapes = {(96, 64), (40, 64)}
    rates = measure(candidates, shapes, torch.float32).rates
    assert set(rates) == {"96x64", "40x64"}
    rates["96x64"] = {"onednn": [1.0] * 3, "torch": [2.0] * 3}
    rates["40x64"] = {"onednn": [2.0] * 3, "torch": [1.0] * 3}
    assert fastest(rates, "96x64") == "torch"
    assert fastest(rates, "7x7") is None
    ops, draw = MeasuredOps(candidates, rates), torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=draw)
    for outputs in (96, 40, 7):
        weight = torch.randn(outputs, 64, generator=draw)
        product = ops.linear(x.clone(), ops.pack(weight))
        assert torch.allclose(product, x @ weight.T, atol=1e-4)


def test_only_ops_of_the_asked_precision_are_measured() -> None:
    assert "torch" not in serving("cpu", torch.int8)
    assert {"onednn", "torch"} <= set(serving("cpu", torch.bfloat16))
