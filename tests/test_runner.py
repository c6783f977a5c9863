"""The runner: the same tokens whatever the batch, and honest words about what it cannot do.

Owns the equivalence of greedy tokens on the tiny model (alone, batched, in chunks, padded, late)
and the tests of batch, timer and start-up refusals. Every plan is made by hand and run for real.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import PackedBatch
from engine.config import ConfigError, EngineConfig
from engine.device import device_name
from engine.messages import SamplingParams
from engine.plan import Plan
from engine.rows import PLACEHOLDER
from engine.runner import ModelRunner
from engine.timer import CallTimer
from tests import tiny
from tests.steps import GREEDY, Hand, Row, load, plan_of

OUTPUTS = 24
PROMPTS = [
    [5 + (7 * row + 3 * index * index) % 310 for index in range(length)]
    for row, length in enumerate([1, 2, 15, 16, 17, 40, 100])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module", params=["sdpa", "reference"])
def runner(request: pytest.FixtureRequest, model: Path) -> ModelRunner:
    loaded = load(model, attention_backend=request.param)
    assert loaded.backend == request.param
    return loaded


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """Each prompt's greedy tokens, computed alone, prompt at once, by the oracle."""
    hand = Hand(load(model, attention_backend="reference"))
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    for row in rows:
        hand.finish(row, outputs=OUTPUTS)
    outputs = [row.output for row in rows]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS), "every text is another"
    assert all(len(set(output)) > 5 for output in outputs), "no text only repeats itself"
    return outputs


def test_tokens_alone_are_the_oracles(runner: ModelRunner, alone: list[list[int]]) -> None:
    hand = Hand(runner)
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        row = hand.add(prompt, OUTPUTS)
        hand.finish(row, outputs=OUTPUTS)
        assert row.output == expected


def test_tokens_in_a_batch_are_the_same(runner: ModelRunner, alone: list[list[int]]) -> None:
    hand = Hand(runner)
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    hand.finish(*rows, outputs=OUTPUTS)
    assert [row.output for row in rows] == alone


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_tokens_in_chunks_are_the_same(
    runner: ModelRunner, alone: list[list[int]], chunk: int
) -> None:
    hand = Hand(runner)
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    hand.finish(*rows, outputs=OUTPUTS, chunk=chunk)
    assert [row.output for row in rows] == alone


def test_rows_that_come_and_go_change_nothing(runner: ModelRunner, alone: list[list[int]]) -> None:
    hand = Hand(runner)
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    started: list[Row] = []
    waiting = list(rows)
    while any(len(row.output) < OUTPUTS for row in rows):
        started += waiting[:1]
        waiting = waiting[1:]
        live = [row for row in reversed(started) if len(row.output) < OUTPUTS]
        hand.step(*((row, min(9, len(row.tokens) - row.computed)) for row in live))
    assert [row.output for row in rows] == alone


def test_recomputed_rows_in_other_blocks_are_the_same(
    runner: ModelRunner, alone: list[list[int]]
) -> None:
    hand = Hand(runner)
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    hand.finish(*rows, outputs=OUTPUTS // 2)
    for row in rows[::2]:
        hand.free(row)
    for row in rows[::2]:
        row.table = hand.add(row.tokens, OUTPUTS).table
        row.computed = 0
    hand.finish(*rows, outputs=OUTPUTS, chunk=20)
    assert [row.output for row in rows] == alone


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_padding_to_a_bucket_changes_nothing(
    model: Path, alone: list[list[int]], backend: str
) -> None:
    hand = Hand(load(model, attention_backend=backend, decode_buckets="4,16"))
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    hand.step(*((row, len(row.tokens)) for row in rows))
    for _ in range(OUTPUTS - 1):
        output = hand.step(*((row, 1) for row in rows))
        assert (output.bucket, output.padding_tokens) == (16, 9)
    assert [row.output for row in rows] == alone


def test_only_decodes_are_padded_and_only_to_what_fits(model: Path) -> None:
    hand = Hand(load(model, decode_buckets="2,4"))
    rows = [hand.add([5, 6, 7], 8) for _ in range(5)]
    mixed = hand.step((rows[0], 3), (rows[1], 2))
    assert (mixed.bucket, mixed.padding_tokens) == (0, 0)
    exact = hand.step((rows[0], 1), (rows[1], 1))
    assert (exact.bucket, exact.padding_tokens) == (2, 0)
    for row in rows[1:]:
        hand.step((row, len(row.tokens) - row.computed))
    padded = hand.step(*((row, 1) for row in rows[:3]))
    assert (padded.bucket, padded.padding_tokens) == (4, 1)
    many = hand.step(*((row, 1) for row in rows))
    assert (many.bucket, many.padding_tokens) == (0, 0)


def test_a_step_of_chunks_alone_samples_nothing(runner: ModelRunner) -> None:
    hand = Hand(runner)
    first, second = hand.add(PROMPTS[5], 1), hand.add(PROMPTS[6], 1)
    output = hand.step((first, 10), (second, 20))
    assert output.tokens == []
    assert output.errors == {}
    assert output.device_ns > 0


def test_tokens_that_only_the_device_knows_are_found_there(
    runner: ModelRunner, alone: list[list[int]]
) -> None:
    hand = Hand(runner)
    rows = [hand.add(prompt, OUTPUTS) for prompt in PROMPTS]
    others = hand.add(PROMPTS[5], 1)
    pending = [runner.run(plan_of(1, (*((row, len(row.tokens)) for row in rows), (others, 7))))]
    for step in range(2, OUTPUTS + 1):
        for row in rows:
            row.computed = len(row.tokens)
            row.tokens.append(PLACEHOLDER)
        pending.append(runner.run(plan_of(step, tuple((row, 1) for row in reversed(rows)))))
        read(pending.pop(0).wait().tokens, rows, step - 1)
    read(pending.pop().wait().tokens, rows, OUTPUTS)
    assert [row.output for row in rows] == alone


def read(tokens: list[int], rows: list[Row], step: int) -> None:
    """Put a step's tokens where their placeholders stand; later steps ran in reverse order."""
    for row, token in zip(rows if step == 1 else reversed(rows), tokens, strict=True):
        place = row.prompt + step - 1
        if place == len(row.tokens):
            row.tokens.append(token)
        row.tokens[place] = token


def test_a_sampled_row_is_the_same_alone_and_batched(runner: ModelRunner) -> None:
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=seed) for seed in range(3)]
    hand = Hand(runner)
    single = [hand.add(PROMPTS[4], OUTPUTS, one) for one in params]
    for row in single:
        hand.finish(row, outputs=OUTPUTS)
    batched = [hand.add(PROMPTS[4], OUTPUTS, one) for one in params]
    greedy = hand.add(PROMPTS[5], OUTPUTS)
    hand.finish(*batched, greedy, outputs=OUTPUTS, chunk=10)
    assert [row.output for row in batched] == [row.output for row in single]
    assert len({tuple(row.output) for row in batched}) == 3


# ---- what goes wrong


def test_a_row_that_is_not_finite_ends_alone_and_leaves_no_trace(
    model: Path, alone: list[list[int]]
) -> None:
    runner = load(model, attention_backend="sdpa")
    used = {token for part in PROMPTS + alone for token in part}
    poison = next(token for token in range(3, 320) if token not in used)
    with torch.inference_mode():
        runner._decoder._weights.embedding[poison] = torch.nan
    hand = Hand(runner)
    bad = hand.add([5, poison, *range(8, 40)], 8)
    good = hand.add(PROMPTS[5], OUTPUTS)
    output = hand.step((good, 40), (bad, len(bad.tokens)))
    assert set(output.errors) == {bad.request}
    assert "not finite in step 1" in output.errors[bad.request]
    hand.finish(good, outputs=OUTPUTS)
    assert good.output == alone[5]
    hand.free(bad)
    heirs = [hand.add(PROMPTS[1], OUTPUTS), hand.add(PROMPTS[6], OUTPUTS)]
    assert set(heirs[0].table) <= set(bad.table)
    hand.finish(*heirs, outputs=OUTPUTS)
    assert [heir.output for heir in heirs] == [alone[1], alone[6]]


def test_forgotten_requests_leave_nothing_behind(runner: ModelRunner) -> None:
    hand = Hand(runner)
    row = hand.add([5, 6], 2)
    hand.step((row, 2))
    runner.forget(row.request)
    runner.forget(row.request)
    row.computed, row.tokens[-1] = 2, PLACEHOLDER
    with pytest.raises(KeyError):
        runner.run(plan_of(2, ((row, 1),))).wait()
    again = hand.add([5, 6], 2)
    hand.finish(again, outputs=2)


def test_warming_up_reports_and_leaves_the_pool_alone(model: Path) -> None:
    hand = Hand(load(model, decode_buckets="4,8", max_num_batched_tokens=64))
    row = hand.add(PROMPTS[6], OUTPUTS)
    hand.finish(row, outputs=4, chunk=30)
    told: list[tuple[str, float]] = []
    hand.runner.warm_up(lambda stage, fraction: told.append((stage, fraction)))
    assert [stage for stage, _ in told] == ["warming up"] * 4
    assert told[-1][1] == 1.0
    hand.finish(row, outputs=OUTPUTS)
    fresh = Hand(hand.runner)
    same = fresh.add(PROMPTS[6], OUTPUTS)
    fresh.finish(same, outputs=OUTPUTS, chunk=64)
    assert row.output == same.output


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"attention_backend": "flash"}, "--attention-backend must be one of auto, native"),
        ({"device": "tpu"}, "--device must be one of auto, cpu, cuda, not tpu"),
        ({"kv_blocks": 2**31 - 2}, "KV cache of 2147483646 blocks does not fit into memory"),
        ({"kv_blocks": 2**31 - 1}, "--kv-blocks must be at most 2147483646"),
        (
            {"kv_blocks": None, "kv_cache_memory": 2**60},
            "--kv-cache-memory 1152921504606846976 holds",
        ),
        ({"dtype": "f32", "kv_cache_dtype": "int8"}, "beside --dtype f32 it may be f32"),
    ],
)
def test_what_an_operator_cannot_have_is_said_in_one_line(
    model: Path, settings: dict[str, object], cause: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(model, **settings)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        device_name(EngineConfig(device="cuda"))
    assert device_name(EngineConfig()) == "cpu"


# ---- the packed batch


def plan_with_rows(*rows: tuple[int, int, list[int]]) -> Plan:
    """Return a plan of (start, count, table) rows whose ids count up from 100."""
    count = sum(row[1] for row in rows)
    return Plan(
        step=1,
        token_budget=count,
        requests=[10 + index for index in range(len(rows))],
        start_positions=[start for start, _, _ in rows],
        token_counts=[tokens for _, tokens, _ in rows],
        token_ids=list(range(100, 100 + count)),
        block_tables=[table for _, _, table in rows],
        samples=[index != 1 for index in range(len(rows))],
        sampling=[GREEDY] * len(rows),
        output_indices=[0] * len(rows),
    )


def test_a_plan_is_packed_row_after_row() -> None:
    batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
    plan = plan_with_rows((2, 4, [9, 3]), (0, 2, [5]), (8, 1, [7, 1, 2, 11, 12]))
    filled = batch.fill(plan, (4,))
    assert (filled.bucket, filled.padding_tokens, filled.unread) == (0, 0, [])
    step, attention = filled.step, filled.step.attention
    assert step.input_ids.tolist() == list(range(100, 107))
    assert step.positions.tolist() == [2, 3, 4, 5, 0, 1, 8]
    assert step.sample_tokens.tolist() == [3, 6]
    assert attention.slot_mapping.tolist() == [38, 39, 12, 13, 20, 21, 8]
    assert attention.query_starts.tolist() == [0, 4, 6, 7]
    assert attention.context_lengths.tolist() == [6, 2, 9]
    assert attention.block_tables.tolist() == [[9, 3, 0], [5, 0, 0], [7, 1, 2]]
    assert attention.query_lengths_host == [4, 2, 1]
    assert attention.context_lengths_host == [6, 2, 9]


def test_few_decodes_are_packed_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(6, 1, [9, 3]), (0, 1, [5]), (12, 1, [7, 1, 2, 11, 12]), (3, 1, [6])]
    plan = replace(plan_with_rows(*rows), token_ids=[4, PLACEHOLDER, 5, PLACEHOLDER])
    told = []
    for few in (16, 0):
        monkeypatch.setattr("engine.batch.FEW_ROWS", few)
        batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
        batch.fill(plan_with_rows((0, 30, list(range(1, 9)))), ())  # leaves what must not be seen
        told.append(batch.fill(plan, ()))
    few_rows, many = told
    assert few_rows.unread == many.unread == [(1, 11), (3, 13)]
    for name in ("input_ids", "positions", "sample_tokens"):
        assert getattr(few_rows.step, name).tolist() == getattr(many.step, name).tolist(), name
    for name in ("query_starts", "context_lengths", "slot_mapping", "block_tables"):
        mine = getattr(few_rows.step.attention, name)
        theirs = getattr(many.step.attention, name)
        assert mine.tolist() == theirs.tolist(), name
        assert mine.dtype == theirs.dtype
    assert few_rows.step.attention.query_lengths_host == [1] * 4
    assert few_rows.step.attention.context_lengths_host == [7, 1, 13, 4]


def test_padding_rows_lie_in_block_0_after_the_others() -> None:
    batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
    batch.fill(plan_with_rows((0, 30, list(range(1, 9)))), ())
    filled = batch.fill(plan_with_rows((6, 1, [9, 3]), (1, 1, [5])), (4,))
    step, attention = filled.step, filled.step.attention
    assert (filled.bucket, filled.padding_tokens) == (4, 2)
    assert step.input_ids.tolist() == [100, 101, 0, 0]
    assert step.positions.tolist() == [6, 1, 0, 0]
    assert step.sample_tokens.tolist() == [0]
    assert attention.slot_mapping.tolist() == [14, 21, 0, 0]
    assert attention.context_lengths.tolist() == [7, 2, 1, 1]
    assert attention.block_tables.tolist() == [[9, 3], [5, 0], [0, 0], [0, 0]]


def test_idle_rows_feed_their_last_token_again_after_the_others() -> None:
    batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
    plan = replace(
        plan_with_rows((6, 1, [9, 3]), (1, 1, [5])),
        idle_token_ids=[77, 78],
        idle_positions=[5, 0],
        idle_block_tables=[[8, 2], [4]],
    )
    filled = batch.fill(plan, (4, 8))
    step, attention = filled.step, filled.step.attention
    assert (filled.bucket, filled.padding_tokens) == (4, 0)
    assert step.input_ids.tolist() == [100, 101, 77, 78]
    assert step.positions.tolist() == [6, 1, 5, 0]
    assert step.sample_tokens.tolist() == [0]
    assert attention.slot_mapping.tolist() == [14, 21, 9, 16]
    assert attention.context_lengths.tolist() == [7, 2, 6, 1]
    assert attention.block_tables.tolist() == [[9, 3], [5, 0], [8, 2], [4, 0]]
    assert batch.fill(plan, (3, 8)).padding_tokens == 4


def test_unread_tokens_are_told_by_place_and_request() -> None:
    batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
    plan = plan_with_rows((6, 1, [9, 3]), (0, 3, [5]), (4, 1, [1, 2]))
    plan = replace(plan, token_ids=[PLACEHOLDER, 7, 8, 9, PLACEHOLDER])
    assert batch.fill(plan, ()).unread == [(0, 10), (4, 12)]


def test_a_plan_whose_columns_disagree_is_our_mistake() -> None:
    batch = PackedBatch(tokens=32, rows=8, model_len=64, block_tokens=4, device="cpu")
    plan = replace(plan_with_rows((0, 3, [5])), token_ids=[1, 2])
    with pytest.raises(AssertionError):
        batch.fill(plan, ())


def test_the_call_timer_reads_each_mark_of_its_ring() -> None:
    timer = CallTimer()
    first, second = timer.begin(), timer.begin()
    timer.end(second)
    timer.end(first)
    assert timer.read_ns(first) > timer.read_ns(second) > 0
