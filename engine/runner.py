"""Executes plans on the device: fill, forward, sample, score; the Runner that core drives.

Owns the loaded model, the KV cache, the packed inputs of the steps under way and the warm-up; what
live sequences' pasts do to their logits is penalties.py's, and its one writer is here.
engine/build.py makes one. Decides nothing about requests: what a plan says is run, in order, and
what was wrong with a row is reported, not raised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch

from engine import packed
from engine.batch import Filled, PackedBatch
from engine.config import ConfigError, EngineConfig
from engine.logprobs import (
    ScoredPrompts,
    ScoredRows,
    Scores,
    score,
    score_prompts,
    scored_prompts,
    scored_rows,
    told_by_request,
    told_of_prompts,
)
from engine.messages import SamplingParams, TokenLogprobs
from engine.model import Decoder
from engine.penalties import BiasBatch, Penalties, PenaltyBatch, add_biases
from engine.plan import PendingStep, Plan, StepOutput
from engine.sampler import Sampled, SamplingBatch, sample, sampling_batch
from engine.spec import ModelSpec
from engine.timer import DeviceTimer, device_timer
from engine.weights import TORCH_DTYPES, attention_shape
from kernels.base import AttentionBatch, BackendError, Cache, DecoderWeights, StepBatch
from kernels.select import Choice, choose

DEPTH = 2
"""Steps that may be launched and not yet awaited; each needs inputs of its own."""


class _Extras(NamedTuple):
    """What the histories of a plan ask for beyond a token a row; plain steps ask for nothing."""

    penalties: PenaltyBatch | None = None
    biases: BiasBatch | None = None
    rows: ScoredRows | None = None
    prompts: ScoredPrompts | None = None


class _Launched(NamedTuple):
    """A step's results on their way to the host."""

    tokens: torch.Tensor
    finite: torch.Tensor
    scores: Scores | None
    prompt_scores: Scores | None
    mark: int
    copied: "torch.cuda.Event | None"


@dataclass(slots=True)
class _LastTokens:
    """The tokens of the step launched last, still on the device, and where each request's is."""

    tokens: torch.Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)


class _Pending:
    """A launched step; `finish` waits for the device and builds the output."""

    def __init__(self, finish: Callable[[], StepOutput]) -> None:
        self._finish = finish

    def wait(self) -> StepOutput:
        """Return the step's output once its tokens are on the host."""
        return self._finish()


class ModelRunner:
    """Runs one model on one device. Implements engine.plan.Runner."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        spec: ModelSpec,
        weights: DecoderWeights,
        choice: Choice,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = choice.backend.name
        self.refusals = choice.refusals
        self._config = config
        self._spec = spec
        self._kernels = choice.backend
        self._ops = choice.ops
        self._decoder = Decoder(weights, choice.backend, choice.ops, beat)
        self._cache = _allocate(config, spec, choice)
        self._batches = [_packed_batch(config) for _ in range(DEPTH)]
        self._launches = 0
        self._last = _LastTokens()
        assert config.max_model_len is not None
        self._penalties = Penalties(
            vocab_size=spec.vocab_size, model_len=config.max_model_len, device=config.device
        )
        self._timer: DeviceTimer = device_timer(config.device)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        progress: Callable[[str, float], None],
        beat: Callable[[], None] = lambda: None,
    ) -> "ModelRunner":
        """Load the model into memory. `config` is resolved; progress gets stage and fraction.

        beat is called at each layer of each step, and by whatever else takes long.

        Raises SpecError for files that cannot be used, ConfigError for settings that cannot be.
        """
        assert config.engine_threads is not None
        assert config.max_model_len is not None
        torch.set_num_threads(config.engine_threads)
        dtype = TORCH_DTYPES[config.dtype]
        try:
            choice = choose(
                config.attention_backend,
                attention_shape(spec),
                device=config.device,
                dtype=dtype,
                block_tokens=config.block_size,
            )
        except BackendError as error:
            raise ConfigError(f"--attention-backend: {error}") from error
        with torch.inference_mode():
            weights = packed.load(spec, config, choice.ops, progress)
            return cls(config=config, spec=spec, weights=weights, choice=choice, beat=beat)

    def run(self, plan: Plan) -> PendingStep:
        """Take a plan in. On a CPU the work itself is done by `wait`, on CUDA it is launched."""
        device = self._config.device
        batch = self._batches[self._launches % DEPTH]
        self._launches += 1
        filled = batch.fill(plan, self._config.buckets)
        sampling = sampling_batch(plan, self._spec.eos_ids, self._spec.vocab_size, device)
        extras = self._extras(plan) if plan.histories else _Extras()
        if device == "cpu":
            return _Pending(
                lambda: self._collect(
                    plan, filled, extras, self._launch(plan, filled, sampling, extras)
                )
            )
        launched = self._launch(plan, filled, sampling, extras)
        return _Pending(lambda: self._collect(plan, filled, extras, launched))

    def _extras(self, plan: Plan) -> _Extras:
        """Read what the plan's histories ask for while they are as the plan meant them."""
        device = self._config.device
        wanted = [row for row, samples in enumerate(plan.samples) if samples]
        places = {row: place for place, row in enumerate(wanted)}
        return _Extras(
            penalties=self._penalties.batch(plan, places),
            biases=self._penalties.biases(plan, places),
            rows=scored_rows(plan, places, device),
            prompts=scored_prompts(plan, device),
        )

    def forget(self, request: int) -> None:
        """Drop the place of a sequence's last token, and its past."""
        self._last.places.pop(request, None)
        self._penalties.forget(request)

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        """Run the largest prefill and each size of decode once, in block 0 alone."""
        config = self._config
        assert config.max_model_len is not None
        plans = [_idle_plan(1, min(config.max_num_batched_tokens, config.max_model_len), config)]
        plans += [_idle_plan(rows, 1, config) for rows in (*config.buckets, config.max_num_seqs)]
        for number, plan in enumerate(plans):
            self.run(plan).wait()
            progress("warming up", (number + 1) / len(plans))
        self._last = _LastTokens()

    @torch.inference_mode()
    def logits(self, tokens: list[int], rows: int | None = None) -> torch.Tensor:
        """Return float32 logits [T, vocabulary] of a text, for measuring.

        It is computed `rows` tokens a step, for None in one, as one sequence in blocks from 1 on;
        no other may be alive.
        """
        size = rows or len(tokens)
        return torch.cat(
            [
                self._decoder.forward(self._piece(tokens, first, size), self._cache)
                for first in range(0, len(tokens), size)
            ]
        )

    def _piece(self, tokens: list[int], first: int, count: int) -> StepBatch:
        """Return the step that computes tokens first..first+count of a text in blocks from 1 on."""
        size, piece = self._config.block_size, tokens[first : first + count]
        end, places = first + len(piece), torch.arange(len(piece))
        return StepBatch(
            input_ids=torch.tensor(piece),
            positions=places + first,
            sample_tokens=places,
            attention=AttentionBatch(
                query_starts=torch.tensor([0, len(piece)], dtype=torch.int32),
                context_lengths=torch.tensor([end], dtype=torch.int32),
                slot_mapping=places + first + size,
                block_tables=torch.arange(1, 1 - (-end // size), dtype=torch.int32)[None],
                query_lengths_host=[len(piece)],
                context_lengths_host=[end],
            ),
        )

    @torch.inference_mode()
    def _launch(
        self, plan: Plan, filled: Filled, sampling: SamplingBatch, extras: _Extras
    ) -> _Launched:
        """Forward, sample, score; on CUDA also start the copies to the host."""
        mark = self._timer.begin()
        if filled.unread:
            self._fill_unread(filled)
        logits, prompt_scores = self._forward(filled, extras.prompts)
        sampled, scores = self._sample(logits, sampling, extras)
        self._timer.end(mark)
        wanted = [number for number, one in zip(plan.requests, plan.samples, strict=True) if one]
        self._last = _LastTokens(sampled.tokens, {number: i for i, number in enumerate(wanted)})
        if self._config.device == "cpu":
            return _Launched(sampled.tokens, sampled.finite, scores, prompt_scores, mark, None)
        tokens = sampled.tokens.to("cpu", non_blocking=True)
        finite = sampled.finite.to("cpu", non_blocking=True)
        scores = scores.to_host() if scores else None
        prompt_scores = prompt_scores.to_host() if prompt_scores else None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return _Launched(tokens, finite, scores, prompt_scores, mark, copied)

    def _forward(
        self, filled: Filled, prompts: ScoredPrompts | None
    ) -> tuple[torch.Tensor, Scores | None]:
        """Return the logits of the rows that sample, and the scores of prompts' tokens."""
        if prompts is None:
            return self._decoder.forward(filled.step, self._cache), None
        hidden = self._decoder.hidden(filled.step, self._cache)
        scores = score_prompts(
            lambda places: self._decoder.logits(hidden, places), prompts, self._spec.vocab_size
        )
        return self._decoder.logits(hidden, filled.step.sample_tokens), scores

    def _sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, extras: _Extras
    ) -> tuple[Sampled, Scores | None]:
        """Change the logits by pasts and biases, sample, note; score by the logits as they were."""
        raw = logits.index_select(0, extras.rows.rows) if extras.rows else None
        if extras.penalties:
            self._penalties.apply(logits, extras.penalties)
        if extras.biases:
            add_biases(logits, extras.biases)
        sampled = sample(logits, sampling, self._ops)
        if extras.penalties:
            self._penalties.note(sampled.tokens, extras.penalties)
        if raw is None or extras.rows is None:
            return sampled, None
        chosen = sampled.tokens.index_select(0, extras.rows.rows)
        return sampled, score(raw, chosen, max(extras.rows.tops))

    def _fill_unread(self, filled: Filled) -> None:
        """Put the tokens of the step before, which the host has not read, into the inputs."""
        assert self._last.tokens is not None, "a placeholder with no step before it"
        device = self._last.tokens.device
        indices = torch.tensor([index for index, _ in filled.unread], device=device)
        places = [self._last.places[request] for _, request in filled.unread]
        tokens = self._last.tokens.index_select(0, torch.tensor(places, device=device))
        filled.step.input_ids.index_copy_(0, indices, tokens)

    @torch.inference_mode()
    def _collect(
        self, plan: Plan, filled: Filled, extras: _Extras, launched: _Launched
    ) -> StepOutput:
        """Wait for the step's results and report what was wrong with a row."""
        if launched.copied is not None:
            launched.copied.synchronize()
        bad: set[int] = set()
        if not bool(launched.finite.all()):
            wanted = [row for row, samples in enumerate(plan.samples) if samples]
            bad.update(wanted[at] for at in (~launched.finite).nonzero().flatten().tolist())
        logprobs, prompt_logprobs = {}, {}
        if extras.rows and launched.scores:
            logprobs = told_by_request(launched.scores, extras.rows)
        if extras.prompts and launched.prompt_scores:
            prompt_logprobs = told_of_prompts(launched.prompt_scores, extras.prompts)
            if not bool(launched.prompt_scores.chosen.isfinite().all()):
                bad.update(_without_sense(plan, prompt_logprobs))
        for row in bad:
            self._kernels.clear_blocks(self._cache, list(plan.block_tables[row]))
        return StepOutput(
            tokens=launched.tokens.tolist(),
            device_ns=self._timer.read_ns(launched.mark),
            padding_tokens=filled.padding_tokens,
            bucket=filled.bucket,
            errors={
                plan.requests[row]: f"its logits were not finite in step {plan.step}" for row in bad
            },
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _without_sense(
    plan: Plan, prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]]
) -> list[int]:
    """Return the rows whose prompts have scores that are no numbers, and take these out."""
    rows = [
        row
        for row, request in enumerate(plan.requests)
        if request in prompt_logprobs
        and not all(isfinite(one.logprob) for one in prompt_logprobs[request][1])
    ]
    for row in rows:
        del prompt_logprobs[plan.requests[row]]
    return rows


def _allocate(config: EngineConfig, spec: ModelSpec, choice: Choice) -> Cache:
    assert config.kv_blocks is not None
    try:
        return choice.backend.allocate_kv(
            attention_shape(spec),
            config.kv_blocks + 1,  # block 0 belongs to padding rows
            config.block_size,
            TORCH_DTYPES[config.dtype],
            config.device,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"--kv-blocks {config.kv_blocks}: the KV cache does not fit into memory "
            f"({str(error).splitlines()[0]})"
        ) from error


def _packed_batch(config: EngineConfig) -> PackedBatch:
    assert config.max_model_len is not None
    most = max((*config.buckets, config.max_num_seqs))
    return PackedBatch(
        tokens=max(config.max_num_batched_tokens, most),
        rows=most,
        model_len=config.max_model_len,
        block_tokens=config.block_size,
        device=config.device,
    )


def _idle_plan(rows: int, tokens: int, config: EngineConfig) -> Plan:
    """Return a plan of rows that belong to nobody and lie in block 0."""
    blocks = -(-tokens // config.block_size)
    return Plan(
        step=0,
        token_budget=rows * tokens,
        requests=[-1 - row for row in range(rows)],
        start_positions=[0] * rows,
        token_counts=[tokens] * rows,
        token_ids=[0] * (rows * tokens),
        block_tables=[[0] * blocks] * rows,
        kv_block_counts=[blocks] * rows,
        samples=[True] * rows,
        sampling=[SamplingParams(temperature=0.0)] * rows,
        output_indices=[0] * rows,
    )
