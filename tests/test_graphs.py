"""Captured decode steps: which one serves a batch, that it tells the same, and when none does.

GIVEN real models and backends on a CPU, where a replay does the recorded work again on the fixed
memory, WHEN steps are decoded with and without graphs, THEN tokens and logits are the same to the
bit, whatever lies in padding's block; any other number of the host's misses.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build
from engine.config import BUCKETS, ConfigError, EngineConfig, buckets_of
from engine.graphs import GRAPHS_MAX, CallRecorder, DecodeMemory, Graphs
from engine.messages import SamplingParams
from engine.plan import History
from kernels.base import AttentionBatch, StepBatch
from kernels.native import refusal
from tests import tiny
from tests.simulation import Recorder
from tests.steps import Hand, load, plan_of
from tests.test_equivalence import GREEDY as LONG
from tests.test_equivalence import WallClock, run, submits

ROWS, BLOCKS, VOCABULARY = 8, 4, 11
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def test_the_buckets_are_those_of_the_rows_there_can_be() -> None:
    assert BUCKETS[:6] == (1, 2, 4, 8, 16, 24)
    assert BUCKETS[-1] == 256
    assert buckets_of(1) == (1,)
    assert buckets_of(20) == (1, 2, 4, 8, 16, 24)
    assert buckets_of(24) == (1, 2, 4, 8, 16, 24)
    assert buckets_of(1000) == BUCKETS


@dataclass
class Kernels:
    """Kernels whose launches take two numbers of the host: parts of the longest context, rows."""

    captured: int = 0

    def launch_key(self, batch: AttentionBatch) -> tuple[int, ...]:
        longest = max(batch.context_lengths_host)
        return (-(-longest // 16), len(batch.query_lengths_host))

    def forward(self, step: StepBatch) -> torch.Tensor:
        self.captured += 1
        found = torch.zeros((len(step.input_ids), VOCABULARY))
        found[:, 0] = step.input_ids.float()
        found[:, 1] = step.attention.context_lengths.float()
        found[:, 2] = step.attention.block_tables.float().sum(1)
        return found[step.sample_tokens]


def graphs_of(kernels: Kernels) -> Graphs:
    memory = DecodeMemory.of(
        rows=ROWS, blocks=BLOCKS, block_tokens=16, vocab_size=VOCABULARY, device="cpu"
    )
    return Graphs(
        memory=memory,
        forward=kernels.forward,
        launch_key=kernels.launch_key,
        recorder=CallRecorder(),
    )


def decodes(ids: list[int], contexts: list[int], width: int) -> StepBatch:
    """Return a step of one token a row, whose tables count up."""
    rows = len(ids)
    return StepBatch(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(contexts) - 1,
        sample_tokens=torch.arange(rows),
        attention=AttentionBatch(
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            slot_mapping=torch.tensor(contexts),
            block_tables=torch.arange(rows * width, dtype=torch.int32).view(rows, width),
            query_lengths_host=[1] * rows,
            context_lengths_host=contexts,
        ),
    )


def test_each_bucket_is_captured_for_each_set_of_numbers_the_largest_first() -> None:
    kernels, seen = Kernels(), []
    graphs = graphs_of(kernels)
    graphs.capture((2, 4, 8), BLOCKS * 16, seen.append)
    # Contexts of 1 to 16, 32 and 64 tokens are 1, 2 and 4 parts.
    assert len(graphs) == kernels.captured == 9
    assert seen == [pytest.approx(part / 9) for part in range(1, 10)]
    assert [key.bucket for key in graphs._replays] == [8, 8, 8, 4, 4, 4, 2, 2, 2]


def test_a_replay_reads_what_the_step_holds_and_nothing_of_the_one_before() -> None:
    kernels = Kernels()
    graphs = graphs_of(kernels)
    graphs.capture((4,), BLOCKS * 16, lambda _: None)
    wide = decodes([5, 6, 7, 8], [60, 3, 3, 3], 4)
    narrow = decodes([9, 1, 2, 3], [7, 8, 1, 1], 1)
    for step in (wide, narrow):
        told = graphs.replay(4, step, 4)
        assert told is not None
        assert torch.equal(told[:, :2], kernels.forward(step)[:, :2])
    memory = graphs._memory
    assert memory.tables[:4, :1].flatten().tolist() == [0, 1, 2, 3]
    some = replace(wide, sample_tokens=torch.tensor([1, 3]))
    told = graphs.replay(4, some, 3)
    assert told is not None
    assert told[:, 0].tolist() == [6, 8]


def test_another_number_of_the_host_misses() -> None:
    """Whatever number a launch takes, a step that needs another is not what was captured."""

    @dataclass
    class Numbers(Kernels):
        numbers: tuple[int, ...] = (3, 64, 2)

        def launch_key(self, batch: AttentionBatch) -> tuple[int, ...]:
            return self.numbers

    kernels = Numbers()
    graphs = graphs_of(kernels)
    graphs.capture((2, 4), 64, lambda _: None)
    step = decodes([5, 6], [3, 4], 1)
    assert graphs.replay(2, step, 2) is not None
    for place in range(3):
        changed = list(kernels.numbers)
        changed[place] += 1
        other = replace(kernels, numbers=tuple(changed))
        assert graphs.key_of(2, [1, 1], [3, 4]) in graphs._replays
        graphs._launch_key = other.launch_key
        assert graphs.replay(2, step, 2) is None
        graphs._launch_key = kernels.launch_key
    assert graphs.replay(0, step, 2) is None, "no bucket, no graph"
    assert graphs.replay(8, step, 2) is None, "a bucket that was not captured"


def test_tables_count_as_wide_as_they_are_in_the_fixed_memory() -> None:
    """A launch may depend on their width, which in the packed batch is the longest row's."""

    class Wide(Kernels):
        def launch_key(self, batch: AttentionBatch) -> tuple[int, ...]:
            return (batch.block_tables.shape[1], batch.block_tables.stride(0))

    graphs = graphs_of(Wide())
    graphs.capture((2,), 64, lambda _: None)
    assert [key.launch for key in graphs._replays] == [(BLOCKS, BLOCKS)]
    assert graphs.replay(2, decodes([5, 6], [3, 4], 1), 2) is not None


def test_a_long_models_tables_are_captured_in_a_few_widths() -> None:
    """Rows of short contexts are launched as if the model were short."""
    memory = DecodeMemory.of(rows=2, blocks=2000, block_tokens=16, vocab_size=3, device="cpu")
    seen: list[int] = []

    def forward(step: StepBatch) -> torch.Tensor:
        seen.append(step.attention.block_tables.shape[1])
        return torch.zeros((len(step.input_ids), 3))

    graphs = Graphs(
        memory=memory, forward=forward, launch_key=lambda _: (), recorder=CallRecorder()
    )
    graphs.capture((2,), 32000, lambda _: None)
    assert seen == [256, 1024, 2000]
    for context, width in ((4096, 256), (4097, 1024), (32000, 2000)):
        seen.clear()
        assert graphs.replay(2, decodes([5, 6], [3, context], -(-context // 16)), 2) is not None
        assert seen == [width]


def test_a_backend_whose_numbers_never_repeat_is_refused() -> None:
    class Endless(Kernels):
        def launch_key(self, batch: AttentionBatch) -> tuple[int, ...]:
            return (batch.context_lengths_host[0],)

    with pytest.raises(RuntimeError, match="sets of numbers"):
        graphs_of(Endless()).capture(tuple(range(1, 9)), 2**GRAPHS_MAX, lambda _: None)


def test_what_graphs_take_is_told_by_two() -> None:
    left = iter([1000, 700, 650])
    graphs = graphs_of(Kernels())
    assert graphs.estimate((2, 4, 8), BLOCKS * 16, lambda: next(left)) == 300 + 8 * 50
    assert not graphs._replays


# ---- the whole path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.Shape(hidden=128, head_dim=32, intermediate=128)
    return tiny.write(tmp_path_factory.mktemp("tiny"), shape=shape)


needs_native = pytest.mark.skipif(refusal() is not None, reason=f"no C++: {refusal()}")


@needs_native
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_answers_with_graphs_are_those_without(model: Path, depth: int, batching: str) -> None:
    answers, records = [], []
    for graphs in ("off", "on"):
        recorder = Recorder()
        config = EngineConfig(
            model=str(model),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_blocks=64,
            engine_threads=1,
            dtype="int8",
            attention_backend="native",
            decode_buckets="1,2,4,8",
            loop_depth=depth,
            batching=batching,
            graphs=graphs,
        )
        core, told = build(
            config, emit=recorder, clock=WallClock(), progress=lambda stage, fraction: None
        )
        answers.append(run(core, recorder, submits(LONG)))
        records.append(recorder.iterations)
    assert f'"graphs":"{graphs}"' in told.config
    assert answers[0] == answers[1]
    eager, captured = records
    assert not any(record.graph for record in eager)
    decoding = [record for record in captured if record.bucket]
    assert decoding
    assert all(record.graph for record in decoding)
    assert not any(record.graph for record in captured if not record.bucket)
    assert [record.padding_tokens for record in eager] == [
        record.padding_tokens for record in captured
    ]


@needs_native
def test_a_replay_is_the_eager_step_to_the_bit_whatever_padding_lies_in(model: Path) -> None:
    """Block 0 is full of NaN: no row of a sequence may see it."""
    outputs = []
    for graphs in ("off", "on"):
        hand = Hand(
            load(
                model,
                dtype="int8",
                attention_backend="native",
                decode_buckets="4,8",
                graphs=graphs,
                max_model_len=256,
            )
        )
        if graphs == "on":
            assert hand.runner.capture(lambda stage, part: None) is None
        logits: list[torch.Tensor] = []
        hand.runner._sample = keeping(hand.runner._sample, logits)  # type: ignore[method-assign]
        rows = [hand.add([5 + row, 6, 7 * row + 3][: 1 + row % 3], 8) for row in range(5)]
        hand.step(*((row, len(row.tokens)) for row in rows))
        with torch.inference_mode():
            held: torch.Tensor = hand.runner._cache.values  # type: ignore[attr-defined]
            held.view(torch.uint8)[:, 0] = 255  # NaN in every type of float
        told = [hand.step(*((row, 1) for row in rows)) for _ in range(7)]
        assert {one.bucket for one in told} == {8}
        assert {one.graph for one in told} == {graphs == "on"}
        assert not any(one.errors for one in told)
        outputs.append(logits)
    for eager, replayed in zip(*outputs, strict=True):
        assert torch.equal(eager, replayed)


def keeping(sample: Callable[..., Any], logits: list[torch.Tensor]) -> Callable[..., Any]:
    """Return the same sampling, which keeps the logits that it is given."""

    def kept(given: torch.Tensor, *more: object) -> object:
        logits.append(given.clone())
        return sample(given, *more)

    return kept


@needs_native
def test_a_prompt_that_is_scored_goes_the_whole_way(model: Path) -> None:
    """Its logits are wanted of every token; a captured step gives the last ones alone."""
    settings = {"decode_buckets": "1,2", "graphs": "on", "max_model_len": 256}
    hand = Hand(load(model, dtype="int8", attention_backend="native", **settings))
    assert hand.runner.capture(lambda stage, part: None) is None
    plain, scored = hand.add([5], 1), hand.add([5], 1, SCORED)
    assert hand.step((plain, 1)).graph
    plan = plan_of(2, ((scored, 1),))
    plan.histories.append(History(row=0, tokens=[5, 6], prompt_tokens=2))
    plan.samples[0] = False  # the first of two tokens of its prompt
    output = hand.runner.run(plan).wait()
    assert not output.graph
    assert output.bucket == 1
    assert output.prompt_logprobs[scored.request][0] == 1


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"attention_backend": "sdpa"}, "--graphs on: sdpa takes numbers from the host"),
        ({"decode_buckets": ""}, "--graphs on: there are no --decode-buckets"),
    ],
)
def test_graphs_that_cannot_be_are_refused(
    model: Path, settings: dict[str, object], cause: str
) -> None:
    config = EngineConfig(model=str(model), kv_blocks=16, graphs="on", engine_threads=1, **settings)
    with pytest.raises(ConfigError, match=cause):
        build(config, emit=Recorder(), clock=WallClock(), progress=lambda stage, fraction: None)


def test_the_memory_of_a_decode_is_padding_until_a_step_is_taken() -> None:
    memory = DecodeMemory.of(rows=3, blocks=2, block_tokens=16, vocab_size=5, device="cpu")
    step = memory.step(2, 9)
    assert step.attention.context_lengths.tolist() == [1, 1]
    assert step.attention.context_lengths_host == [9, 9]
    assert step.attention.query_starts.tolist() == [0, 1, 2]
    assert not memory.tables.any()
    assert {field.name for field in fields(memory)} >= {"ids", "tables", "logits"}
