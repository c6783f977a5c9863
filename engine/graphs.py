"""Decode steps captured once and replayed: one launch in place of hundreds, the same numbers.

Owns the fixed memory that captured steps read and write, which captured step serves a batch, and
what it took to capture them. engine/runner.py captures after its warm-up and asks for each step.
On a CPU a replay does the same work again, so that all but NVIDIA's capture runs everywhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from kernels.base import AttentionBatch, StepBatch

WARM_UPS = 2
"""Runs before a capture: what is compiled, tuned or made at first use must not be captured."""

GRAPHS_MAX = 512
"""Bound of the captured steps: a backend whose numbers hardly repeat is not worth capturing."""

WIDTH_TOKENS, WIDER = 4096, 4
"""Widths of block tables, in tokens: each so many times the one before, up to the whole model.

A launch follows from how wide tables are: one for the longest model would split short rows in vain.
"""

Work = Callable[[], None]


class GraphKey(NamedTuple):
    """What a captured step may be replayed for: rows, blocks, and all numbers of its kernels."""

    bucket: int
    width: int
    launch: tuple[int, ...]


class Recorder(Protocol):
    """Makes work on fixed memory repeatable."""

    def record(self, work: Work) -> Work:
        """Do the work; return what does it again with what lies in its memory then."""
        ...


class CallRecorder:
    """Repeats by calling again: all there is on a CPU."""

    def record(self, work: Work) -> Work:
        """Do the work, return it."""
        work()
        return work


class CudaRecorder:
    """Captures into CUDA graphs that share one pool of memory, since they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Work) -> Work:
        """Warm up beside the capture, then capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay  # which holds the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMemory:
    """What captured steps read and write: one row a sequence, tables as wide as the model is long.

    One set serves all buckets, from its first row on, and all steps in flight: copies into it and
    replays follow each other on one stream.
    """

    ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    slots: torch.Tensor  # [rows] int64
    contexts: torch.Tensor  # [rows] int32
    tables: torch.Tensor  # [rows, blocks] int32
    places: torch.Tensor  # [rows] int64: 0, 1, 2 ...
    starts: torch.Tensor  # [rows + 1] int32: 0, 1, 2 ...
    logits: torch.Tensor  # [rows, vocabulary] float32
    block_tokens: int

    @classmethod
    def of(
        cls, *, rows: int, blocks: int, block_tokens: int, vocab_size: int, device: str
    ) -> "DecodeMemory":
        """Return memory in which every row is padding: token 0 at position 0 of block 0."""
        return cls(
            ids=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slots=torch.zeros(rows, dtype=torch.int64, device=device),
            contexts=torch.ones(rows, dtype=torch.int32, device=device),
            tables=torch.zeros((rows, blocks), dtype=torch.int32, device=device),
            places=torch.arange(rows, device=device),
            starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            logits=torch.empty((rows, vocab_size), dtype=torch.float32, device=device),
            block_tokens=block_tokens,
        )

    def width(self, context: int) -> int:
        """Return how many blocks of a table are looked at where this is the longest context."""
        tokens = WIDTH_TOKENS
        while tokens < context:
            tokens *= WIDER
        return min(-(-tokens // self.block_tokens), self.tables.shape[1])

    def step(self, rows: int, context: int) -> StepBatch:
        """Return the first rows as a step; `context` is what the host is told of each."""
        return StepBatch(
            input_ids=self.ids[:rows],
            positions=self.positions[:rows],
            sample_tokens=self.places[:rows],
            attention=AttentionBatch(
                query_starts=self.starts[: rows + 1],
                context_lengths=self.contexts[:rows],
                slot_mapping=self.slots[:rows],
                block_tables=self.tables[:rows, : self.width(context)],
                query_lengths_host=[1] * rows,
                context_lengths_host=[context] * rows,
            ),
        )

    def take(self, step: StepBatch) -> None:
        """Copy a padded step of decodes in; what lies beyond a row's context is never read."""
        rows, attention = len(step.input_ids), step.attention
        torch._foreach_copy_(
            [self.ids[:rows], self.positions[:rows], self.slots[:rows], self.contexts[:rows]],
            [step.input_ids, step.positions, attention.slot_mapping, attention.context_lengths],
        )
        self.tables[:rows, : attention.block_tables.shape[1]].copy_(attention.block_tables)


class Graphs:
    """The captured steps of one engine. forward computes a step's logits [rows, vocabulary]."""

    def __init__(
        self,
        *,
        memory: DecodeMemory,
        forward: Callable[[StepBatch], torch.Tensor],
        launch_key: Callable[[AttentionBatch], tuple[int, ...]],
        recorder: Recorder,
    ) -> None:
        self._memory = memory
        self._forward = forward
        self._launch_key = launch_key
        self._recorder = recorder
        self._replays: dict[GraphKey, Work] = {}
        self._fixed: dict[tuple[int, int], AttentionBatch] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def capture(
        self, buckets: tuple[int, ...], longest: int, progress: Callable[[float], None]
    ) -> None:
        """Capture each bucket, the largest first: what it needed serves the smaller ones too.

        Raises RuntimeError when there would be too many, or when the device cannot.
        """
        wanted = self._wanted(buckets, longest)
        for number, (key, context) in enumerate(wanted, 1):
            self._replays[key] = self._recorder.record(self._work(key.bucket, context))
            progress(number / len(wanted))

    def estimate(
        self, buckets: tuple[int, ...], longest: int, free_bytes: Callable[[], int]
    ) -> int:
        """Return the bytes that all captures will take, by two: the rest is like the second."""
        wanted = self._wanted(buckets, longest)
        left = [free_bytes()]
        kept = []
        for key, context in wanted[:2]:
            kept.append(self._recorder.record(self._work(key.bucket, context)))
            left.append(free_bytes())
        first, *others = (max(0, before - after) for before, after in pairwise(left))
        return first + sum(others) * (len(wanted) - 1)

    def key_of(self, bucket: int, queries: list[int], contexts: list[int]) -> GraphKey:
        """Return what a captured step must have been captured with to serve these rows.

        They are asked for as they would lie in the fixed memory.
        """
        longest = max(contexts)
        shape = (bucket, self._memory.width(longest))
        fixed = self._fixed.get(shape)
        if fixed is None:
            fixed = self._fixed[shape] = self._memory.step(bucket, longest).attention
        asked = replace(fixed, query_lengths_host=queries, context_lengths_host=contexts)
        return GraphKey(*shape, self._launch_key(asked))

    def replay(self, bucket: int, step: StepBatch, rows: int) -> torch.Tensor | None:
        """Return the logits of the tokens that sample, None if no captured step serves.

        The first `rows` rows are neither padding nor idle. The result is overwritten by the next.
        """
        if not bucket or bucket > len(self._memory.ids):
            return None
        told = step.attention
        key = self.key_of(bucket, told.query_lengths_host, told.context_lengths_host)
        replay = self._replays.get(key)
        if replay is None:
            return None
        self._memory.take(step)
        replay()
        if len(step.sample_tokens) == rows:
            return self._memory.logits[:rows]
        return self._memory.logits.index_select(0, step.sample_tokens)

    def _wanted(self, buckets: tuple[int, ...], longest: int) -> list[tuple[GraphKey, int]]:
        """Return what is to be captured, the largest first, each with a context of its key."""
        wanted = [
            pair for bucket in sorted(buckets, reverse=True) for pair in self._keys(bucket, longest)
        ]
        if len(wanted) > GRAPHS_MAX:
            raise RuntimeError(f"its decodes take {len(wanted)} sets of numbers")
        return wanted

    def _keys(self, bucket: int, longest: int) -> Iterator[tuple[GraphKey, int]]:
        """Yield each key of a bucket and a context that has it, over contexts of all sizes."""
        found: set[GraphKey] = set()
        for context in sorted({*(2**power for power in range(longest.bit_length())), longest}):
            key = self.key_of(bucket, [1] * bucket, [context] * bucket)
            if key not in found:
                found.add(key)
                yield key, context

    def _work(self, bucket: int, context: int) -> Work:
        step, logits = self._memory.step(bucket, context), self._memory.logits[:bucket]

        def work() -> None:
            logits.copy_(self._forward(step))

        return work
