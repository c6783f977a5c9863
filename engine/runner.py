"""Executes plans on the device: fill, forward, sample, score; the Runner that core drives.

Owns the loaded model, the KV cache, the packed inputs of the steps under way, the captured steps.
What live sequences' pasts do to their logits is penalties.py's, whose one writer is here.
engine/build.py makes one. Decides nothing about requests: what a plan says is run, in order, and
what was wrong with a row is reported, not raised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine import packed
from engine.batch import Filled, PackedBatch
from engine.config import ConfigError, EngineConfig
from engine.graphs import CallRecorder, CudaRecorder, DecodeMemory, Graphs
from engine.kernel_table import fitted
from engine.logprobs import (
    ScoredPrompts,
    Scores,
    score,
    score_prompts,
    scored_prompts,
    scored_rows,
)
from engine.memory import Memory
from engine.model import Decoder
from engine.penalties import Penalties, add_biases
from engine.plan import PendingStep, Plan, StepOutput
from engine.ranges import ranges
from engine.rehearsal import text_step, warm_ups, worst_plans
from engine.results import Extras, Launched, Pending, told_of_step
from engine.sampler import Sampled, SamplingBatch, sample, sampling_batch
from engine.spec import ModelSpec
from engine.timer import DeviceTimer, device_timer
from engine.uploads import upload
from engine.weights import TORCH_DTYPES, attention_shape
from kernels.base import BackendError, Cache, DecoderWeights, GraphBackend
from kernels.select import Choice, choose

DEPTH = 2
"""Steps that may be launched and not yet awaited; each needs inputs of its own."""


@dataclass(slots=True)
class _LastTokens:
    """The tokens of the step launched last, still on the device, and where each request's is."""

    tokens: torch.Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)


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
        self._choice = choice
        self._beat = beat
        self._range = ranges(config.nvtx)
        self._kernels = choice.backend
        self._ops = choice.ops
        self._decoder = Decoder(weights, choice.backend, choice.ops, beat)
        self._cache: Cache = _allocate(config, spec, choice)
        self._decode_memory: DecodeMemory | None = None
        self._graphs: Graphs | None = None
        self._crowded = False
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
                int8_cache=config.kv_cache_dtype == "int8",
            )
        except BackendError as error:
            raise ConfigError(f"--attention-backend: {error}") from error
        choice = fitted(choice, config, spec)
        with torch.inference_mode():
            weights = packed.load(spec, config, choice.ops, progress)
            return cls(config=config, spec=spec, weights=weights, choice=choice, beat=beat)

    def run(self, plan: Plan) -> PendingStep:
        """Take a plan in. On a CPU the work itself is done by `wait`, on CUDA it is launched."""
        device = self._config.device
        if self._crowded:  # what the allocator keeps in pieces may do as a whole
            torch.cuda.empty_cache()
            self._crowded = False
        batch = self._batches[self._launches % DEPTH]
        self._launches += 1
        with self._range(plan.step, "fill"):
            filled = batch.fill(plan, self._config.buckets)
            sampling = sampling_batch(plan, self._spec.eos_ids, self._spec.vocab_size, device)
            extras = self._extras(plan) if plan.histories else Extras()
        if device == "cpu":
            return Pending(
                lambda: self._collect(
                    plan, filled, extras, self._launch(plan, filled, sampling, extras)
                )
            )
        try:
            launched = self._launch(plan, filled, sampling, extras)
        except torch.OutOfMemoryError:
            self._crowded = True
            raise
        return Pending(lambda: self._collect(plan, filled, extras, launched))

    def _extras(self, plan: Plan) -> Extras:
        """Read what the plan's histories ask for while they are as the plan meant them."""
        device = self._config.device
        wanted = [row for row, samples in enumerate(plan.samples) if samples]
        places = {row: place for place, row in enumerate(wanted)}
        return Extras(
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
        plans = warm_ups(self._config)
        for number, plan in enumerate(plans, 1):
            self.run(plan).wait()
            progress("warming up", number / len(plans))
        self._last = _LastTokens()

    def run_worst(self) -> None:
        """Run the steps that need the most memory, one after another, in block 0 alone."""
        for plan in worst_plans(self._config):
            self.run(plan).wait()
        self._last = _LastTokens()

    def settle(self, config: EngineConfig) -> None:
        """Go on with the limits in force, once they are known, and with the cache they give."""
        self._config, self._cache = config, None
        self._graphs, self._decode_memory = None, None
        self._cache = _allocate(config, self._spec, self._choice)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float], None]) -> str | None:
        """Capture the decode steps of all buckets; return why there are none, if so."""
        config, graphs = self._config, self._new_graphs()
        if isinstance(graphs, str):
            return graphs
        assert config.max_model_len is not None
        try:
            graphs.capture(
                config.buckets, config.max_model_len, lambda part: progress("capturing", part)
            )
        except RuntimeError as error:
            return f"cannot be captured: {error}".splitlines()[0]
        self._graphs = graphs
        return None

    @torch.inference_mode()
    def graphs_bytes(self, memory: Memory) -> int:
        """Return what all graphs will take, by the two largest."""
        graphs = self._new_graphs()
        if isinstance(graphs, str):
            return 0
        assert self._config.max_model_len is not None
        return graphs.estimate(self._config.buckets, self._config.max_model_len, memory.free_bytes)

    def _new_graphs(self) -> Graphs | str:
        """Return graphs with nothing captured, or why there can be none."""
        config, backend = self._config, self._kernels
        if config.graphs != "on" or not config.buckets:
            return "graphs are off" if config.graphs != "on" else "there are no --decode-buckets"
        if not isinstance(backend, GraphBackend):
            return f"{backend.name} takes numbers from the host that change with each step"
        assert config.max_model_len is not None
        if self._decode_memory is None:
            self._decode_memory = DecodeMemory.of(
                rows=config.buckets[-1],
                blocks=-(-config.max_model_len // config.block_size),
                block_tokens=config.block_size,
                vocab_size=self._spec.vocab_size,
                device=config.device,
            )
        return Graphs(
            memory=self._decode_memory,
            forward=lambda step: self._decoder.forward(step, self._cache),
            launch_key=lambda batch: backend.launch_key(batch, self._cache),
            recorder=CallRecorder() if config.device == "cpu" else CudaRecorder(),
        )

    @torch.inference_mode()
    def logits(self, tokens: list[int], rows: int | None = None) -> torch.Tensor:
        """Return float32 logits [T, vocabulary] of a text, for measuring.

        It is computed `rows` tokens a step, for None in one, as one sequence in blocks from 1 on;
        no other may be alive.
        """
        size, block_size = rows or len(tokens), self._config.block_size
        return torch.cat(
            [
                self._decoder.forward(text_step(tokens, first, size, block_size), self._cache)
                for first in range(0, len(tokens), size)
            ]
        )

    @torch.inference_mode()
    def _launch(
        self, plan: Plan, filled: Filled, sampling: SamplingBatch, extras: Extras
    ) -> Launched:
        """Forward, sample, score; on CUDA also start the copies to the host."""
        mark = self._timer.begin()
        if filled.unread:
            self._fill_unread(filled)
        with self._range(plan.step, "forward"):
            replayed = self._replayed(plan, filled, extras.prompts)
            logits, prompt_scores = replayed or self._forward(filled, extras.prompts)
        with self._range(plan.step, "sample"):
            sampled, scores = self._sample(logits, sampling, extras)
        self._timer.end(mark)
        wanted = [number for number, one in zip(plan.requests, plan.samples, strict=True) if one]
        self._last = _LastTokens(sampled.tokens, {number: i for i, number in enumerate(wanted)})
        graph = replayed is not None
        if self._config.device == "cpu":
            results = (sampled.tokens, sampled.best, scores, prompt_scores)
            return Launched(*results, mark, graph, None)
        tokens = sampled.tokens.to("cpu", non_blocking=True)
        best = sampled.best.to("cpu", non_blocking=True)
        scores = scores.to_host() if scores else None
        prompt_scores = prompt_scores.to_host() if prompt_scores else None
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Launched(tokens, best, scores, prompt_scores, mark, graph, copied)

    def _replayed(
        self, plan: Plan, filled: Filled, prompts: ScoredPrompts | None
    ) -> tuple[torch.Tensor, None] | None:
        """Return the logits of the rows that sample by a captured step, None if none serves."""
        if self._graphs is None or prompts is not None:
            return None
        logits = self._graphs.replay(filled.bucket, filled.step, len(plan.requests))
        if logits is None:
            return None
        self._beat()
        return logits, None

    def _forward(
        self, filled: Filled, prompts: ScoredPrompts | None
    ) -> tuple[torch.Tensor, Scores | None]:
        """Return the logits of the rows that sample, and the scores of prompts' tokens."""
        if prompts is None:
            return self._decoder.forward(filled.step, self._cache), None
        logits, logits_of = self._decoder.forward_all(filled.step, self._cache)
        return logits, score_prompts(logits_of, prompts, self._spec.vocab_size)

    def _sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, extras: Extras
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
        device = self._config.device
        indices = upload([index for index, _ in filled.unread], device)
        places = [self._last.places[request] for _, request in filled.unread]
        tokens = self._last.tokens.index_select(0, upload(places, device))
        filled.step.input_ids.index_copy_(0, indices, tokens)

    @torch.inference_mode()
    def _collect(
        self, plan: Plan, filled: Filled, extras: Extras, launched: Launched
    ) -> StepOutput:
        """Wait for the step's results; clear the blocks of a row with which something is wrong."""
        if launched.copied is not None:
            launched.copied.synchronize()
        output, bad = told_of_step(
            plan, filled, extras, launched, device_ns=self._timer.read_ns(launched.mark)
        )
        for row in bad:
            self._kernels.clear_blocks(self._cache, list(plan.block_tables[row]))
        return output


def _allocate(config: EngineConfig, spec: ModelSpec, choice: Choice) -> Cache:
    assert config.kv_blocks is not None
    try:
        return choice.backend.allocate_kv(
            attention_shape(spec),
            config.kv_blocks + 1,  # block 0 belongs to padding rows
            config.block_size,
            TORCH_DTYPES[config.kv_cache_dtype],
            config.device,
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"the KV cache of {config.kv_blocks} blocks does not fit into memory: set a smaller "
            f"--kv-blocks or --kv-cache-memory ({str(error).splitlines()[0]})"
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
