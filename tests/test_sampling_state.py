"""Sampling state belongs to the sequence: whoever else is there, wherever its rows and blocks go.

GIVEN requests with every kind of penalty, bias, score and seed side by side, WHEN the real core
runs them batched, in chunks, preempted, in each mode and at loop depth 1 and 2, THEN tokens, ends
and log-probabilities are those of a lone run, and these are transformers' own.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.core import Core
from engine.logprobs import scored_prompts
from engine.loop import merge
from engine.messages import Delta, SamplingParams, Submit, TokenLogprobs
from engine.plan import History, Plan
from engine.runner import ModelRunner
from tests import tiny
from tests.simulation import Recorder, Simulation
from tests.test_equivalence import CASES, engine, run, submits
from tests.test_penalties import oracle

STOP = 77
WISHES = {
    1: {"frequency_penalty": 1.5, "temperature": 0.0},
    2: {"presence_penalty": 1.0, "repetition_penalty": 1.3, "temperature": 0.0},
    3: {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.6,
        "repetition_penalty": 0.8,
        "temperature": 1.1,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": 11,
        "logprobs": 5,
    },
    4: {"logit_bias": ((9, 4.0), (30, -100.0), (55, 6.5)), "temperature": 0.0},
    5: {
        "temperature": 0.0,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
    6: {"temperature": 1.2, "top_k": 40, "seed": 5},
    7: {"temperature": 0.0},
    8: {
        "temperature": 0.0,
        "repetition_penalty": 1.2,
        "logit_bias": ((STOP, 100.0),),
        "stop_token_ids": (STOP,),
        "min_tokens": 12,
        "logprobs": 0,
        "prompt_logprobs": 0,
    },
}
GREEDY = (1, 2, 4, 5, 7, 8)


def wishes() -> list[Submit]:
    """Return the requests of the equivalence tests, each with parameters of its own."""
    return [
        msgspec.structs.replace(
            submit, sampling=SamplingParams(ignore_eos=True, **WISHES[submit.request])
        )
        for submit in submits(SamplingParams())
    ]


@dataclass
class Told:
    """What clients heard of every sequence."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finishes: dict[int, str | None] = field(default_factory=dict)


def told(core: Core, recorder: Recorder, requests: list[Submit]) -> Told:
    """Run the requests; every step's logprobs must be as many as its tokens, if asked for."""
    found = Told(run(core, recorder, requests))
    asked = {submit.request: submit.sampling.logprobs is not None for submit in requests}
    for delta in recorder.deltas:
        if delta.tokens:
            assert len(delta.logprobs or []) == len(delta.tokens) * asked[delta.request]
        found.logprobs.setdefault(delta.request, []).extend(delta.logprobs or [])
        found.prompts.setdefault(delta.request, []).extend(delta.prompt_logprobs or [])
        found.finishes[delta.request] = delta.finish
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    assert runner._penalties.kept == 0
    assert core.scheduler.roster.histories == 0
    return found


def assert_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.top_tokens == other.top_tokens
        values = ([item.logprob, *item.top_logprobs] for item in (one, other))
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Told:
    """Return what each client hears when nobody else is there."""
    core, recorder = engine(model, attention_backend="reference")
    found = Told({})
    for submit in wishes():
        recorder.deltas.clear()
        one = told(core, recorder, [submit])
        for name in ("tokens", "logprobs", "prompts", "finishes"):
            getattr(found, name).update(getattr(one, name))
    return found


@pytest.fixture(scope="module")
def truth(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.inference_mode()
def logits_of(truth: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    return np.asarray(truth(torch.tensor([tokens])).logits[0].double().numpy())


def test_lone_runs_are_the_oracles(alone: Told, truth: LlamaForCausalLM) -> None:
    """transformers' logits, changed by plain numpy: the argmax is our token, every time."""
    for submit in wishes():
        if submit.request not in GREEDY:
            continue
        params, output = submit.sampling, []
        for token in alone.tokens[submit.request]:
            logits = logits_of(truth, submit.prompt + output)[-1]
            changed = oracle(logits, submit.prompt, output, params)
            if len(output) < params.min_tokens:
                changed[list(params.stop_token_ids)] = -np.inf
            assert np.argmax(changed) == token
            assert np.diff(np.sort(changed)[-2:]) > 1e-3, "the test needs another seed"
            output.append(token)
    assert alone.finishes[8] == "stop"
    assert len(alone.tokens[8]) == 13
    plain = {number: alone.tokens[number] for number in GREEDY}
    assert len({tuple(tokens) for tokens in plain.values()}) == len(plain)


def test_scores_are_the_oracles(alone: Told, truth: LlamaForCausalLM) -> None:
    for submit in wishes():
        number, prompt = submit.request, submit.prompt
        everything = prompt + alone.tokens[number]
        expected = torch.from_numpy(logits_of(truth, everything)).log_softmax(-1)
        scored = [(1, alone.prompts[number], submit.sampling.prompt_logprobs)]
        scored.append((len(prompt), alone.logprobs[number], submit.sampling.logprobs))
        for first, found, top in scored:
            for place, one in enumerate(found, first):
                row = expected[place - 1]
                assert abs(one.logprob - row[everything[place]].item()) < 1e-3
                best = row.topk(top or 0)
                assert one.top_tokens == best.indices.tolist()
                np.testing.assert_allclose(one.top_logprobs, best.values, atol=1e-3)


def test_only_those_who_asked_are_told(alone: Told) -> None:
    for submit in wishes():
        number, sampling = submit.request, submit.sampling
        asked = sampling.logprobs is not None
        assert len(alone.logprobs[number]) == len(alone.tokens[number]) * asked
        asked = sampling.prompt_logprobs is not None
        assert len(alone.prompts[number]) == (len(submit.prompt) - 1) * asked


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_company_changes_nothing(model: Path, alone: Told, case: str, depth: int) -> None:
    core, recorder = engine(model, loop_depth=depth, **CASES[case])
    found = told(core, recorder, wishes())
    assert found.tokens == alone.tokens
    assert found.finishes == alone.finishes
    for number in WISHES:
        assert_close(found.logprobs[number], alone.logprobs[number])
        assert_close(found.prompts[number], alone.prompts[number])
    if case.startswith("preempted"):
        hit = {number for record in recorder.iterations for number in record.preempted}
        assert hit & {1, 2, 3, 5}, "nobody with penalties was preempted"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_preempted_half_scored_is_told_once(
    model: Path, alone: Told, depth: int
) -> None:
    core, recorder = engine(
        model,
        loop_depth=depth,
        scheduling_policy="priority",
        max_num_seqs=1,
        max_num_batched_tokens=8,
        block_size=4,
    )
    requests = wishes()
    late = [submit for submit in requests if submit.request not in (5, 8)]
    early = [
        msgspec.structs.replace(submit, priority=9)
        for submit in requests
        if submit.request in (5, 8)
    ]
    found = told(core, recorder, early + late)
    assert found.tokens == alone.tokens
    for number in WISHES:
        assert_close(found.prompts[number], alone.prompts[number])
    prompts = {submit.request: len(submit.prompt) for submit in early}
    lost = [
        (victim, tokens)
        for record in recorder.iterations
        for victim, tokens in zip(record.preempted, record.preempted_lost_tokens, strict=True)
    ]
    assert any(0 < tokens < prompts.get(victim, 0) for victim, tokens in lost)


def test_penalties_count_output_alone_after_preemption(model: Path) -> None:
    """A long text is preempted after 30 outputs by an earlier arrival's growth (vllm#5349)."""
    penalised = SamplingParams(temperature=0.0, ignore_eos=True, frequency_penalty=1.5)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    first, second = (
        msgspec.structs.replace(submit, max_tokens=60, sampling=sampling, priority=0)
        for submit, sampling in zip(submits(greedy)[:2], (greedy, penalised), strict=True)
    )
    for depth in (1, 2):
        core, recorder = engine(model, loop_depth=depth)
        expected = run(core, recorder, [second])[second.request]
        tight = {"block_size": 4, "kv_blocks": 26, "max_model_len": 96}
        core, recorder = engine(model, loop_depth=depth, **tight)
        assert run(core, recorder, [first, second])[second.request] == expected
        victims = [record for record in recorder.iterations if second.request in record.preempted]
        assert victims
        lost = victims[0].preempted_lost_tokens[0]
        assert lost > len(second.prompt) + 25


def test_a_prompts_scores_are_the_same_whatever_the_cache_holds(
    model: Path, truth: LlamaForCausalLM
) -> None:
    """Three times, and with another prompt of the same beginning in between (vllm#42245)."""
    prompt = [3 + (position * 29) % 300 for position in range(3 * 16 + 2)]
    other = prompt[:32] + [9] * 12
    expected = torch.from_numpy(logits_of(truth, prompt)).log_softmax(-1)
    expected = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    scoring = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    plain = SamplingParams(temperature=0.0, ignore_eos=True)
    settings: list[dict[str, object]] = [
        {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
        for caching in (True, False)
        for budget in (512, 16)
    ]
    for setting in settings:
        core, recorder = engine(model, **setting)
        for number, (tokens, params) in enumerate(
            [(prompt, scoring), (other, plain), (prompt, scoring), (prompt, plain)] * 2, 1
        ):
            recorder.deltas.clear()
            submit = Submit(
                request=number,
                request_id=str(number),
                prompt=tokens,
                max_tokens=1,
                sampling=params,
                received_at_ns=0,
            )
            found = told(core, recorder, [submit])
            if params is scoring:
                values = [one.logprob for one in found.prompts[number]]
                np.testing.assert_allclose(values, expected.numpy(), atol=1e-3)
        hits = sum(sum(record.admitted_cached_tokens) for record in recorder.iterations)
        assert (hits > 0) == setting["enable_prefix_caching"]


def scores(first: int, last: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(place)) for place in range(first, last)]


def test_a_prompts_token_that_is_scored_twice_is_told_once() -> None:
    simulation = Simulation()
    number = simulation.add("A", 40, 4)
    roster = simulation.scheduler.roster
    for first, last in ((1, 9), (1, 12), (3, 8), (12, 20), (9, 21)):
        roster.score_prompts({number: (first, scores(first, last))})
    found = [one for delta in roster.take_gains().each() for one in delta.prompt_logprobs or []]
    assert found == scores(1, 21)
    with pytest.raises(AssertionError, match="out of order"):
        roster.score_prompts({number: (22, scores(22, 23))})


def test_only_positions_not_told_before_are_scored() -> None:
    """A prompt of 30, of which 10 were told, is computed again behind a plain row of 5."""
    tokens = list(range(100, 130))
    plan = Plan(
        step=1,
        token_budget=99,
        requests=[4, 8],
        start_positions=[7, 0],
        token_counts=[5, 30],
        samples=[False, True],
        sampling=[SamplingParams(), SamplingParams(prompt_logprobs=3)],
        output_indices=[0, 0],
        histories=[History(row=1, tokens=tokens, prompt_tokens=30, scored=10)],
    )
    wanted = scored_prompts(plan, "cpu")
    assert wanted is not None
    assert wanted.places.tolist() == list(range(5 + 9, 5 + 29))
    assert wanted.targets.tolist() == tokens[10:]
    assert (wanted.requests, wanted.firsts, wanted.counts, wanted.tops) == ([8], [10], [20], [3])
    plan.histories = [History(row=1, tokens=tokens, prompt_tokens=30, scored=30)]
    assert scored_prompts(plan, "cpu") is None


def test_unsent_reports_keep_scores_beside_their_tokens() -> None:
    deltas = [
        Delta(1, [], prompt_logprobs=scores(1, 4)),
        Delta(1, [50], prompt_logprobs=scores(4, 5), logprobs=scores(50, 51)),
        Delta(1, [51, 52], logprobs=scores(51, 53)),
        Delta(1, [], "length"),
    ]
    one = functools.reduce(merge, deltas)
    assert one == Delta(1, [50, 51, 52], "length", None, scores(50, 53), scores(1, 5))
    plain = functools.reduce(merge, [Delta(2, [5]), Delta(2, [6], "stop")])
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)
