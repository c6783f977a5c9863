"""Sampling: what each parameter means, and that a row is nobody else's business.

Owns the tests of engine/sampler.py, with tokens found by PyTorch and by C++. Logits are drawn with
fixed seeds; distributions are judged by chi-square against the exact probabilities, so that a wrong
filter fails and luck does not.
"""

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.plan import Plan
from engine.sampler import Sampled, SamplingBatch, sample, sampling_batch, uniforms
from kernels.choose import Chooser, Drawn, TorchChooser
from kernels.native import TARGETS, targets
from kernels.native_ops import NativeOps, NativeThreads, threads_for

EOS = (0, 2)
VOCAB = 5000


pytestmark = pytest.mark.usefixtures("one_thread")


def plan_of(params: list[SamplingParams], indices: list[int]) -> Plan:
    """Return a plan in which every row samples."""
    rows = len(params)
    return Plan(
        step=1,
        token_budget=rows,
        requests=list(range(rows)),
        samples=[True] * rows,
        sampling=params,
        output_indices=indices,
    )


class Sampler:
    """Samples with one chooser."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def __call__(
        self, logits: torch.Tensor, params: list[SamplingParams], indices: list[int] | None = None
    ) -> list[int]:
        return self.sampled(logits, params, indices).tokens.tolist()

    def sampled(
        self, logits: torch.Tensor, params: list[SamplingParams], indices: list[int] | None = None
    ) -> Sampled:
        plan = plan_of(params, indices or [0] * len(params))
        batch = sampling_batch(plan, EOS, logits.shape[1], "cpu")
        return sample(logits.clone(), batch, self.chooser)


@pytest.fixture(params=["torch", *TARGETS])
def draw(request: pytest.FixtureRequest) -> Sampler:
    """Return one that samples by PyTorch, or by C++ for a CPU of some kind."""
    if request.param == "torch":
        return Sampler(TorchChooser())
    return Sampler(NativeOps(threads_of(request.param)))


def threads_of(target: str) -> NativeThreads:
    if target not in targets():
        pytest.skip(f"this CPU does not run {target}")
    return threads_for(target)


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_k=50, seed=1),
    SamplingParams(temperature=0.8, top_p=0.1, seed=2),
    SamplingParams(temperature=1.0, top_k=1, seed=3),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5),
    SamplingParams(temperature=5.0, top_p=0.99, seed=6),
    SamplingParams(temperature=1.0, top_k=10**9, seed=-7),
    SamplingParams(temperature=0.9, seed=2**80, min_tokens=9),
    SamplingParams(temperature=1.3, seed=8, min_p=0.05),
]


def test_a_row_draws_the_same_alone_and_in_any_batch(draw: Sampler) -> None:
    logits = some_logits(len(MIXED))
    indices = [3, 0, 7, 1, 100, 2, 5, 8, 4, 6]
    together = draw(logits, MIXED, indices)
    for row, params in enumerate(MIXED):
        assert draw(logits[row : row + 1], [params], [indices[row]]) == [together[row]]
    order = [4, 8, 1, 0, 7, 6, 9, 2, 3, 5]
    shuffled = draw(logits[order], [MIXED[i] for i in order], [indices[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_many_rows_are_drawn_in_parts_and_are_the_same(draw: Sampler) -> None:
    vocab = 50_000
    logits = some_logits(200, vocab)
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=row) for row in range(200)]
    together = draw(logits, params)
    assert [draw(logits[row : row + 1], [params[row]])[0] for row in range(0, 200, 23)] == (
        together[::23]
    )


def test_top_k_of_one_and_temperature_of_zero_are_greedy(draw: Sampler) -> None:
    logits = some_logits(5)
    params = [
        SamplingParams(temperature=0.0, seed=1),
        SamplingParams(temperature=1.0, top_k=1, seed=2),
        SamplingParams(temperature=1e-9, seed=3),
        SamplingParams(temperature=2.0, top_p=1e-9, seed=4),
        SamplingParams(temperature=2.0, min_p=1.0, seed=5),
    ]
    assert draw(logits, params) == logits.argmax(-1).tolist()


def test_seeds_and_output_indices_make_different_draws(draw: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = {
        (seed, index): draw(logits, [SamplingParams(seed=seed)], [index])[0]
        for seed in range(8)
        for index in range(8)
    }
    assert len(set(tokens.values())) > 56
    assert tokens[3, 4] == draw(logits, [SamplingParams(seed=3)], [4])[0]


def test_uniforms_are_uniform_and_independent() -> None:
    count = 20_000
    streams = [
        uniforms([7] * count, list(range(count))),
        uniforms(list(range(count)), [0] * count),
        uniforms([index << 32 for index in range(count)], [3] * count),
    ]
    for values in streams:
        assert 0 <= values.min() < values.max() < 1
        observed = np.histogram(values, bins=64, range=(0, 1))[0]
        assert chi_square(observed, np.full(64, count / 64)) < 120  # 63 degrees: p about 1e-5
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(streams[0], streams[1])[0, 1]) < 0.03


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "degrees"),
    [
        (SamplingParams(temperature=1.0), 19),
        (SamplingParams(temperature=0.5), 19),
        (SamplingParams(temperature=2.0, top_k=7), 6),
        (SamplingParams(temperature=1.0, top_p=0.8), None),
        (SamplingParams(temperature=1.5, top_k=12, top_p=0.7), None),
        (SamplingParams(temperature=1.0, min_p=0.2), None),
        (SamplingParams(temperature=1.5, top_k=15, top_p=0.95, min_p=0.1), None),
    ],
)
def test_draws_follow_the_filtered_distribution(
    draw: Sampler, params: SamplingParams, degrees: int | None
) -> None:
    vocab, count = 20, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    expected = exact(logits.double(), params)
    tokens = draw(logits.expand(count, vocab), [params] * count, list(range(count)))
    observed = np.bincount(tokens, minlength=vocab)
    kept = expected > 0
    assert (observed[~kept] == 0).all(), "a token outside the filter was drawn"
    if degrees is not None:
        assert kept.sum() - 1 == degrees
    limit = kept.sum() - 1 + 5 * (2 * (kept.sum() - 1)) ** 0.5  # five deviations
    assert chi_square(observed[kept], expected[kept] * count) < limit


def test_draws_over_many_blocks_follow_the_distribution(draw: Sampler) -> None:
    vocab, count = 1000, 50_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(6))
    logits[300:700] = -torch.inf
    expected = exact(logits.double(), SamplingParams())
    tokens = draw(logits.expand(count, vocab), [SamplingParams()] * count, list(range(count)))
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[300:700].sum() == 0
    seen = expected > 0
    degrees = seen.sum() - 1
    assert chi_square(observed[seen], expected[seen] * count) < degrees + 5 * (2 * degrees) ** 0.5


def exact(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Return the distribution by the book: temperature, top_k, top_p, min_p, one after another."""
    weights = torch.softmax(logits / params.temperature, -1).numpy()
    order = np.argsort(-weights)
    if params.top_k:
        weights[order[params.top_k :]] = 0
        weights /= weights.sum()
    sums = np.cumsum(weights[order])
    weights[order[1:][sums[:-1] >= params.top_p]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return np.asarray(weights / weights.sum())


def test_a_nucleus_wider_than_the_first_sort_is_whole(draw: Sampler) -> None:
    vocab = 4000
    logits = torch.linspace(0.001, 0, vocab)  # nearly flat: 0.9 needs 3,600 tokens
    count = 3000
    params = [SamplingParams(top_p=0.9, seed=seed) for seed in range(count)]
    tokens = np.array(draw(logits.expand(count, vocab), params))
    assert tokens.max() < 3605
    assert tokens.max() > 3500
    assert abs(tokens.mean() - 1800) < 100


def test_tokens_that_tie_with_the_last_one_kept_are_kept(draw: Sampler) -> None:
    logits = torch.tensor([5.0, 1.0, 1.0, 1.0, -5.0]).expand(400, 5)
    params = [SamplingParams(temperature=3.0, top_k=2, seed=seed) for seed in range(400)]
    assert set(draw(logits, params)) == {0, 1, 2, 3}


def test_hidden_tokens_are_never_drawn(draw: Sampler) -> None:
    logits = torch.full((500, 50), -torch.inf)
    logits[:, 7] = 0.0
    logits[:, 9] = -1.0
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(500)]
    assert set(draw(logits, params)) == {7, 9}


def test_the_ends_of_the_unit_interval_fall_on_tokens_of_some_weight(draw: Sampler) -> None:
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 307], logits[:, 309] = 0.0, -1.0
    drawn = Drawn(
        rows=torch.arange(2),
        temperature=torch.ones(2),
        top_k=torch.full((2,), 1000),
        top_p=torch.ones(2, dtype=torch.float64),
        uniforms=torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64),
    )
    batch = SamplingBatch(drawn=drawn, forbidden_rows=None, forbidden_tokens=None)
    assert sample(logits, batch, draw.chooser).tokens.tolist() == [307, 309]


def test_min_tokens_hides_what_would_end_the_text(draw: Sampler) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 0], logits[0, 2], logits[0, 4], logits[0, 6] = 9.0, 8.0, 7.0, 6.0
    early = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(4, 99))
    assert [draw(logits, [early], [index])[0] for index in range(5)] == [6, 6, 6, 0, 0]
    assert draw(logits, [SamplingParams(temperature=0.0)]) == [0]
    ignoring = SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=3, stop_token_ids=(0,))
    assert [draw(logits, [ignoring], [index])[0] for index in (2, 3)] == [2, 0]
    assert draw(logits, [SamplingParams(temperature=0.0, ignore_eos=True)]) == [0]


def test_min_tokens_of_one_row_leaves_the_others_alone(draw: Sampler) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 2] = 9.0
    params = [SamplingParams(temperature=0.0, min_tokens=n) for n in (0, 5, 0)]
    assert draw(logits, params)[::2] == [2, 2]
    assert draw(logits, params)[1] != 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_told_and_harm_nobody(
    draw: Sampler, bad: float, temperature: float
) -> None:
    logits = some_logits(3)
    params = [SamplingParams(temperature=temperature, top_p=0.9, seed=row) for row in range(3)]
    clean = draw(logits, params)
    logits[1, 123] = bad
    result = draw.sampled(logits, params)
    assert result.best.isfinite().tolist() == [True, False, True]
    assert result.tokens.tolist()[::2] == clean[::2]
    assert 0 <= result.tokens[1] < VOCAB


@pytest.mark.parametrize("target", TARGETS)
def test_cpp_finds_the_tokens_that_pytorch_finds(target: str) -> None:
    """But where a uniform falls on the border of two tokens, whose weights differ in rounding."""
    cpp = NativeOps(threads_of(target))
    pick, differ, count = np.random.default_rng(11), 0, 400
    params = [
        SamplingParams(
            temperature=float(pick.choice([0.3, 1.0, 2.5])),
            top_k=int(pick.choice([0, 2, 40, 3000])),
            top_p=float(pick.choice([1.0, 0.95, 0.5])),
            min_p=float(pick.choice([0.0, 0.02])),
            seed=row,
        )
        for row in range(count)
    ]
    for vocab in (7, 300, 5003):
        logits = some_logits(count, vocab, seed=vocab)
        found = [Sampler(each)(logits, params) for each in (TorchChooser(), cpp)]
        differ += sum(one != other for one, other in zip(*found, strict=True))
    assert differ <= 3
