"""A plan as packed tensors: ids, positions, slots, query starts, context lengths, block tables.

Owns the preallocated memory of one step's inputs and the padding of pure-decode plans to a bucket.
engine/runner.py is the one writer, through `fill`. Many rows are written with array operations, a
few that decode with plain integers: beside a step of 3 ms forty array operations are felt, since
the weights that pass through the caches leave nothing of them there. Knows no model, no sampling.
"""

from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Plan
from engine.rows import PLACEHOLDER
from kernels.base import AttentionBatch, StepBatch

Integers = npt.NDArray[np.int64]

FEW_ROWS = 16
"""Up to so many decodes plain integers cost less: of one 6 us and not 33, cold 31 and not 103."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """One plan in packed form; valid until its PackedBatch is filled again.

    unread: pack index and request of each token id that only the device knows yet.
    """

    step: StepBatch
    padding_tokens: int
    bucket: int
    unread: list[tuple[int, int]]


class _Field:
    """A preallocated tensor with a host side to write to; on a CPU both are the same memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        on_host = device == "cpu"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=not on_host)
        self._device = self._host if on_host else torch.zeros(size, dtype=dtype, device=device)
        self.array: npt.NDArray[np.signedinteger[npt.NBitBase]] = self._host.numpy()
        self._shape: tuple[int, ...] = (size,)
        self._view = self._device

    def sent(self, *shape: int) -> torch.Tensor:
        """Return the first values on the device in a shape; the copy is ordered by its stream."""
        if shape != self._shape:
            self._shape = shape
            self._view = self._device[: prod(shape)].view(shape)
        if self._device is not self._host:
            self._view.copy_(self._host[: prod(shape)].view(shape), non_blocking=True)
        return self._view


class PackedBatch:
    """Memory for the inputs of one step of at most `tokens` tokens in `rows` rows."""

    def __init__(
        self, *, tokens: int, rows: int, model_len: int, block_tokens: int, device: str
    ) -> None:
        self._block_tokens = block_tokens
        blocks = -(-model_len // block_tokens)
        self._ids = _Field(tokens, torch.int64, device)
        self._positions = _Field(tokens, torch.int64, device)
        self._slots = _Field(tokens, torch.int64, device)
        self._samples = _Field(rows, torch.int64, device)
        self._starts = _Field(rows + 1, torch.int32, device)
        self._contexts = _Field(rows, torch.int32, device)
        self._tables = _Field(rows * blocks, torch.int32, device)

    def fill(self, plan: Plan, buckets: tuple[int, ...]) -> Filled:
        """Write a plan into the preallocated memory, padded to a bucket if it only decodes.

        Idle rows follow the others. A row of padding is token 0 at position 0 of block 0, in
        nobody's way.
        """
        sampled, read = len(plan.requests), len(plan.token_ids)
        if sampled == read <= FEW_ROWS and not (buckets or plan.idle_positions):
            return self._fill_few(plan)
        rows, total = sampled + len(plan.idle_positions), read + len(plan.idle_positions)
        bucket = next((size for size in buckets if size >= rows), 0) if total == rows else 0
        padding = bucket - rows if bucket else 0
        counts: Integers = np.ones(rows + padding, np.int64)
        counts[:sampled] = plan.token_counts
        first: Integers = np.zeros(rows + padding, np.int64)
        first[:sampled] = plan.start_positions
        first[sampled:rows] = plan.idle_positions
        starts = np.concatenate([[0], counts.cumsum()])
        contexts = first + counts
        given = plan.block_tables + plan.idle_block_tables
        tables = _padded(given, rows + padding, int(contexts.max()), self._block_tokens)
        assert starts[sampled] == read, "token_counts and token_ids disagree"

        tokens = total + padding
        assert tokens <= len(self._ids.array), "the plan is larger than the token budget"
        row_of = np.repeat(np.arange(rows + padding), counts)
        positions = np.arange(tokens) - starts[row_of] + first[row_of]
        ids = self._ids.array
        ids[:read] = plan.token_ids
        ids[read:total] = plan.idle_token_ids
        ids[total:tokens] = 0
        self._positions.array[:tokens] = positions
        blocks = tables[row_of, positions // self._block_tokens].astype(np.int64)
        offsets = positions % self._block_tokens
        self._slots.array[:tokens] = blocks * self._block_tokens + offsets
        samples = starts[1 : sampled + 1][plan.samples] - 1
        self._samples.array[: len(samples)] = samples
        self._starts.array[: len(starts)] = starts
        self._contexts.array[: len(contexts)] = contexts
        self._tables.array[: tables.size] = tables.ravel()
        unread = np.flatnonzero(ids[:read] == PLACEHOLDER)
        return Filled(
            step=self._sent(counts.tolist(), contexts.tolist(), len(samples), tables.shape[1]),
            padding_tokens=padding,
            bucket=bucket,
            unread=[(int(index), plan.requests[row_of[index]]) for index in unread],
        )

    def _fill_few(self, plan: Plan) -> Filled:
        """Write a few rows of one token each: what `fill` writes of them."""
        size, rows = self._block_tokens, len(plan.requests)
        contexts = [position + 1 for position in plan.start_positions]
        width = -(-max(contexts) // size)
        samples, unread = 0, []
        for row, position in enumerate(plan.start_positions):
            table, token = plan.block_tables[row], int(plan.token_ids[row])
            if token == PLACEHOLDER:
                unread.append((row, plan.requests[row]))
            self._ids.array[row] = token
            self._positions.array[row] = position
            self._slots.array[row] = table[position // size] * size + position % size
            self._contexts.array[row] = position + 1
            self._starts.array[row + 1] = row + 1
            lacking = [0] * (width - len(table))
            self._tables.array[row * width : (row + 1) * width] = table[:width] + lacking
            if plan.samples[row]:
                self._samples.array[samples] = row
                samples += 1
        return Filled(
            step=self._sent([1] * rows, contexts, samples, width),
            padding_tokens=0,
            bucket=0,
            unread=unread,
        )

    def _sent(self, counts: list[int], contexts: list[int], samples: int, width: int) -> StepBatch:
        """Return what was written, on the device."""
        rows, tokens = len(counts), sum(counts)
        return StepBatch(
            input_ids=self._ids.sent(tokens),
            positions=self._positions.sent(tokens),
            sample_tokens=self._samples.sent(samples),
            attention=AttentionBatch(
                query_starts=self._starts.sent(rows + 1),
                context_lengths=self._contexts.sent(rows),
                slot_mapping=self._slots.sent(tokens),
                block_tables=self._tables.sent(rows, width),
                query_lengths_host=counts,
                context_lengths_host=contexts,
            ),
        )


def _padded(
    block_tables: list[list[int]], rows: int, longest: int, block_tokens: int
) -> npt.NDArray[np.int32]:
    """Return the tables as [rows, blocks of the longest context], filled up with block 0."""
    lengths = np.zeros(rows, np.int64)
    lengths[: len(block_tables)] = [len(table) for table in block_tables]
    width = -(-longest // block_tokens)
    padded = np.zeros((rows, max(width, int(lengths.max()))), np.int32)
    flat = np.fromiter(chain.from_iterable(block_tables), np.int32, int(lengths.sum()))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat
    return padded[:, :width]
