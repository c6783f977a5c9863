"""What its own past and its client's wishes do to a sequence's logits: penalties and biases.

Owns, on the device, the past tokens and their counts of each live sequence that asks for
penalties, and its biases. A sampled token is noted there at once, so that no step waits for the
host. engine/runner.py is the one writer. State belongs to the request, not to a row or to blocks:
moves and preemption never touch it, and no recompute turns an output into prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import SamplingParams
from engine.plan import History, Plan
from engine.uploads import moved, upload

SLOTS_MIN = 8
"""Sequences with penalties that the first allocation holds; it doubles as often as need be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyBatch:
    """The P of a step's sampling rows whose logits depend on their past.

    A row's past is its outputs, after its prompt where repetition counts; `longest` bounds them.
    """

    rows: torch.Tensor  # [P] int64, among the sampling rows
    slots: torch.Tensor  # [P] int64
    lengths: torch.Tensor  # [P] int64
    longest: int
    repetition: torch.Tensor  # [P, 1] float32
    frequency: torch.Tensor  # [P, 1] float32
    presence: torch.Tensor  # [P, 1] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasBatch:
    """Biases of a step's sampling rows, flat; each row's tokens are distinct."""

    rows: torch.Tensor  # [B] int64, among the sampling rows
    tokens: torch.Tensor  # [B] int64
    biases: torch.Tensor  # [B] float32


@dataclass(slots=True)
class _Slot:
    """Where a sequence's past is kept: `outputs` of its tokens, after `prompt` of its prompt."""

    number: int
    prompt: int
    outputs: int


class Penalties:
    """The pasts and biases of live sequences; `kept` of them at this moment."""

    def __init__(self, *, vocab_size: int, model_len: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._past = torch.zeros((0, model_len), dtype=torch.int32, device=device)
        self._counts = torch.zeros((0, vocab_size), device=device)
        self._free: list[int] = []
        self._slots: dict[int, _Slot] = {}
        self._biases: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}

    @property
    def kept(self) -> int:
        """Sequences of which anything is kept."""
        return len(self._slots.keys() | self._biases.keys())

    def forget(self, request: int) -> None:
        """Drop what is kept for a sequence that ended."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot.number)
        self._biases.pop(request, None)

    # ---- before a step

    @torch.inference_mode()
    def batch(self, plan: Plan, places: Mapping[int, int]) -> PenaltyBatch | None:
        """Collect the penalties of a plan; `places` maps plan rows to sampling rows.

        The pasts grow by the tokens that the step will sample.
        """
        wanted = [
            history
            for history in plan.histories
            if history.row in places and plan.sampling[history.row].penalizes
        ]
        if not wanted:
            return None
        params = [plan.sampling[history.row] for history in wanted]
        slots = [self._slot(plan, history) for history in wanted]
        lengths = [slot.prompt + slot.outputs for slot in slots]
        for slot in slots:
            slot.outputs += 1
        device = self._device

        def column(values: list[float]) -> torch.Tensor:
            return upload(values, device, torch.float32)[:, None]

        return PenaltyBatch(
            rows=upload([places[history.row] for history in wanted], device),
            slots=upload([slot.number for slot in slots], device),
            lengths=upload(lengths, device),
            longest=max(lengths),
            repetition=column([one.repetition_penalty for one in params]),
            frequency=column([one.frequency_penalty for one in params]),
            presence=column([one.presence_penalty for one in params]),
        )

    def _slot(self, plan: Plan, history: History) -> _Slot:
        """Return a row's slot, filled from the tokens it has had if it is new."""
        request, index = plan.requests[history.row], plan.output_indices[history.row]
        slot = self._slots.get(request)
        if slot is None:
            slot = self._slots[request] = self._fill(history, plan.sampling[history.row])
        assert slot.outputs == index, "its past and its output disagree"
        return slot

    def _fill(self, history: History, params: SamplingParams) -> _Slot:
        if not self._free:
            self._grow()
        number = self._free.pop()
        start = 0 if params.repetition_penalty != 1 else history.prompt_tokens
        past = moved(torch.tensor(history.tokens[start:], dtype=torch.int64), self._device)
        outputs = len(history.tokens) - history.prompt_tokens
        self._past[number, : len(past)] = past
        self._counts[number] = 0
        self._counts[number].scatter_add_(
            0, past[len(past) - outputs :], torch.ones(outputs, device=self._device)
        )
        return _Slot(number, history.prompt_tokens - start, outputs)

    def _grow(self) -> None:
        size = len(self._past)
        more = max(SLOTS_MIN, size)
        self._past = torch.cat([self._past, self._past.new_zeros((more, self._past.shape[1]))])
        self._counts = torch.cat([self._counts, self._counts.new_zeros((more, self._vocab_size))])
        self._free.extend(reversed(range(size, size + more)))

    def biases(self, plan: Plan, places: Mapping[int, int]) -> BiasBatch | None:
        """Collect the biases of a plan; `places` maps plan rows to sampling rows."""
        rows, tokens, biases = [], [], []
        for history in plan.histories:
            params = plan.sampling[history.row]
            if not params.logit_bias or history.row not in places:
                continue
            found = self._bias(plan.requests[history.row], params)
            rows.append(np.full(len(found[0]), places[history.row], np.int64))
            tokens.append(found[0])
            biases.append(found[1])
        if not rows:
            return None
        return BiasBatch(
            rows=moved(torch.from_numpy(np.concatenate(rows)), self._device),
            tokens=moved(torch.from_numpy(np.concatenate(tokens)), self._device),
            biases=moved(torch.from_numpy(np.concatenate(biases)), self._device),
        )

    def _bias(
        self, request: int, params: SamplingParams
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return a sequence's tokens and biases as arrays, made once: they may be a thousand."""
        found = self._biases.get(request)
        if found is None:
            pairs = [pair for pair in params.logit_bias if 0 <= pair[0] < self._vocab_size]
            found = self._biases[request] = (
                np.array([token for token, _ in pairs], np.int64),
                np.array([bias for _, bias in pairs], np.float32),
            )
        return found

    # ---- on the device

    @torch.inference_mode()
    def apply(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """Penalise logits [S, vocabulary] in place, as vLLM and OpenAI define it.

        A logit of a token in the past is divided by the repetition penalty if positive, else
        multiplied (Keskar et al., 2019); then frequency x count and presence are subtracted.
        A token that stands more than once in a past is written more than once, each time the same.
        """
        if not batch.longest:
            return
        columns = torch.arange(batch.longest, device=logits.device)
        columns = torch.minimum(columns, (batch.lengths[:, None] - 1).clamp_(min=0))
        tokens = self._past[batch.slots[:, None], columns].long()
        counts = self._counts[batch.slots[:, None], tokens]
        places = (batch.rows[:, None] * logits.shape[1]).add(tokens)
        values = logits.view(-1)[places]
        values = torch.where(values > 0, values / batch.repetition, values * batch.repetition)
        values -= batch.frequency * counts + batch.presence * (counts > 0)
        logits.view(-1)[places] = values

    @torch.inference_mode()
    def note(self, tokens: torch.Tensor, batch: PenaltyBatch) -> None:
        """Add the tokens [S] that the step sampled to the pasts."""
        chosen = tokens.index_select(0, batch.rows)
        self._past[batch.slots, batch.lengths] = chosen.int()
        self._counts[batch.slots, chosen] += 1


def add_biases(logits: torch.Tensor, batch: BiasBatch) -> None:
    """Add biases to logits [S, vocabulary] in place."""
    logits[batch.rows, batch.tokens] += batch.biases
