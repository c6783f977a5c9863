"""Our engine in process, to be compared: the real core, scheduler and runner, no server around it.

Owns the driver alone; bench/drive.py runs it. The same settings for every peer that has them: a
budget of 512 tokens a step, up to 64 sequences, no prefix cache.
"""

import msgspec

from bench.counterfactual import Recorder
from bench.engine import GREEDY, MonotonicClock
from bench.workload import DEMO_MODEL, Job
from engine.build import build
from engine.config import EngineConfig
from engine.messages import Gains, SamplingParams, Submit
from telemetry.records import Iteration, RequestEnd


class Told(Recorder):
    """Keeps what each request gained since it was asked, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gained: list[tuple[int, int]] = []
        self.prompt_scores: list[float] = []

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """Take a step's tokens."""
        del iteration, ends
        for delta in gains.each():
            self.gained.append((delta.request, len(delta.tokens)))
            self.prompt_scores += [one.logprob for one in delta.prompt_logprobs or ()]


class Engine:
    """A warm engine; numbers go on from run to run, while the driver's begin at 0 in each."""

    def __init__(self, dtype: str = "auto", model: str | None = None) -> None:
        config = EngineConfig(
            model=model or str(DEMO_MODEL),
            dtype=dtype,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )
        self._told, self._clock, self._base = Told(), MonotonicClock(), 1
        self._core, _ = build(config, emit=self._told, clock=self._clock, progress=lambda *_: None)

    def submit(self, number: int, job: Job) -> None:
        """Take a request in; the first of a run has number 0."""
        if number == 0:
            self._base += 1_000_000
        self._add(number, job.ids, job.answer, GREEDY)

    def _add(self, number: int, ids: list[int], answer: int, sampling: SamplingParams) -> None:
        if not self._core.has_work:
            self._core.wake()
        self._core.add(
            Submit(
                request=self._base + number,
                request_id=str(number),
                prompt=ids,
                max_tokens=answer,
                sampling=sampling,
                received_at_ns=self._clock.now_ns(),
            )
        )

    def poll(self) -> list[tuple[int, int]]:
        """Make one step."""
        if self._core.has_work:
            self._core.step()
        gained, self._told.gained = self._told.gained, []
        return [(number - self._base, tokens) for number, tokens in gained if tokens]

    def loss(self, ids: list[int]) -> float:
        """Return minus the log-probability of the tokens after the first, in nats."""
        self._base += 1_000_000
        self._add(0, ids, 1, msgspec.structs.replace(GREEDY, prompt_logprobs=0))
        while self._core.has_work:
            self._core.step()
        told, self._told.prompt_scores, self._told.gained = self._told.prompt_scores, [], []
        assert len(told) == len(ids) - 1
        return -sum(told)


driver = Engine
