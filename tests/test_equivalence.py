"""Scheduling changes when a token is computed, never which: greedy and seeded, in f32.

GIVEN a seeded tiny model, WHEN the real core runs the same requests alone, batched, in chunks,
preempted, padded to buckets, with prefix hits, in each batching mode, by each policy and at loop
depth 1 and 2, THEN every sequence's tokens are those it had alone.
"""

from dataclasses import replace
from pathlib import Path
from time import monotonic_ns

import pytest

from engine.build import build
from engine.config import BATCHING_MODES, POLICY_NAMES, EngineConfig
from engine.core import Core
from engine.invariants import check
from engine.messages import SamplingParams, Submit
from tests import tiny
from tests.simulation import Recorder

LENGTHS = (3, 16, 17, 40, 33, 64, 40, 20)
OUTPUTS = (20, 12, 25, 9, 30, 14, 14, 18)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_p=0.9, top_k=50, seed=7, ignore_eos=True)


class WallClock:
    def now_ns(self) -> int:
        return monotonic_ns()


def submits(sampling: SamplingParams) -> list[Submit]:
    """Return the requests; numbers 4 and 7 have the same prompt."""
    found = []
    for number, (length, output) in enumerate(zip(LENGTHS, OUTPUTS, strict=True), 1):
        salt = 4 if number == 7 else number
        found.append(
            Submit(
                request=number,
                request_id=f"req-{number}",
                tenant=f"tenant-{number % 2}",
                priority=number % 3,
                prompt=[3 + (salt * 37 + position * 11) % 180 for position in range(length)],
                max_tokens=output,
                sampling=replace_seed(sampling, salt),
                received_at_ns=0,
            )
        )
    return found


def replace_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SamplingParams(**(values | {"seed": seed}))


def engine(model: Path, **settings: object) -> tuple[Core, Recorder]:
    defaults = EngineConfig(
        model=str(model),
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_blocks=64,
        max_model_len=256,
        dtype="f32",
        engine_threads=1,
        enable_prefix_caching=False,
        window_ms=1,
    )
    recorder = Recorder()
    core, _ = build(
        replace(defaults, **settings),
        emit=recorder,
        clock=WallClock(),
        progress=lambda stage, fraction: None,
    )
    return core, recorder


def run(core: Core, recorder: Recorder, requests: list[Submit]) -> dict[int, list[int]]:
    """Add two requests a step, until all are done."""
    waiting = list(requests)
    while waiting or core.has_work:
        for submit in waiting[:2]:
            core.add(submit)
        del waiting[:2]
        core.step()
        check(core.scheduler)
    tokens: dict[int, list[int]] = {submit.request: [] for submit in requests}
    for delta in recorder.deltas:
        tokens[delta.request].extend(delta.tokens)
    assert not recorder.faults
    return tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, dict[int, list[int]]]:
    """Return every sequence's tokens when nobody else is there."""
    found: dict[str, dict[int, list[int]]] = {"greedy": {}, "seeded": {}}
    for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
        core, recorder = engine(model, attention_backend="reference")
        for submit in submits(sampling):
            recorder.deltas.clear()
            found[name] |= run(core, recorder, [submit])
    assert all(
        len(tokens) == output
        for tokens, output in zip(found["greedy"].values(), OUTPUTS, strict=True)
    )
    return found


CASES: dict[str, dict[str, object]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16},
    "tiny blocks": {"block_size": 4, "kv_blocks": 256},
    "preempted": {"kv_blocks": 36, "block_size": 4, "max_model_len": 128},
    "preempted and chunked": {
        "kv_blocks": 36,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_batched_tokens": 24,
    },
    "padded": {"decode_buckets": "4,16"},
    "prefix hits": {"enable_prefix_caching": True},
    "prefix hits under pressure": {
        "enable_prefix_caching": True,
        "kv_blocks": 36,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_batched_tokens": 24,
    },
    **{f"policy {name}": {"scheduling_policy": name, "max_num_seqs": 3} for name in POLICY_NAMES},
    **{f"batching {name}": {"batching": name, "max_num_seqs": 4} for name in BATCHING_MODES},
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_a_lone_run(
    model: Path, alone: dict[str, dict[int, list[int]]], case: str, depth: int
) -> None:
    core, recorder = engine(model, loop_depth=depth, **CASES[case])
    assert run(core, recorder, submits(GREEDY)) == alone["greedy"]
    if case.startswith("preempted") or "pressure" in case:
        assert any(record.preempted for record in recorder.iterations)
    if case.startswith("prefix"):
        assert any(sum(record.admitted_cached_tokens) for record in recorder.iterations)
    if case in ("batching static", "batching dynamic"):
        assert any(record.idle_rows for record in recorder.iterations)
    if case == "padded":
        assert any(record.padding_tokens for record in recorder.iterations)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_seeded_draws_survive_company_chunks_and_preemption(
    model: Path, alone: dict[str, dict[int, list[int]]], backend: str
) -> None:
    core, recorder = engine(
        model,
        attention_backend=backend,
        kv_blocks=36,
        block_size=4,
        max_model_len=128,
        max_num_batched_tokens=24,
    )
    assert run(core, recorder, submits(SEEDED)) == alone["seeded"]
    assert any(record.preempted for record in recorder.iterations)
