"""llama.cpp in process, to be compared; in an environment with llama-cpp-python, which binds it.

Owns the driver alone: a continuous batch as llama.cpp's server forms it, one token for each that
decodes, then prompts up to the budget, without the server. Threads, budget and slots are those
that ours gets; the next token is found by numpy, faster than by llama.cpp's own samplers.
"""

import heapq
import os
from dataclasses import dataclass

import llama_cpp as lib
import numpy as np

from bench.workload import Job

BUDGET = 512
SLOTS = 64
SLOT_TOKENS = 1024


@dataclass
class Sequence:
    """A request in a slot: what of it was not computed yet, how far it is, what is wanted."""

    number: int
    tokens: list[int]
    wanted: int
    position: int = 0


class Context:
    """A model file in a context of 64 slots, or in as many as asked."""

    def __init__(self, path: str, slots: int = SLOTS, unified: bool = False) -> None:
        lib.llama_backend_init()
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = slots * SLOT_TOKENS, slots
        settings.n_batch = settings.n_ubatch = BUDGET
        settings.n_threads = settings.n_threads_batch = os.cpu_count()
        settings.kv_unified, settings.no_perf = unified, True
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        self._context = lib.llama_init_from_model(model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp did not take {path}")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(BUDGET, 0, 1)
        self._slots: dict[int, Sequence] = {}
        self._free = list(range(slots))
        self._waiting: list[Sequence] = []

    def submit(self, number: int, job: Job) -> None:
        """Take a request in."""
        self._waiting.append(Sequence(number, list(job.ids), job.answer))

    def poll(self) -> list[tuple[int, int]]:
        """Make one step."""
        while self._waiting and self._free:
            self._slots[heapq.heappop(self._free)] = self._waiting.pop(0)
        if not self._slots:
            return []
        self._batch.n_tokens = 0
        sampled = [found for slot in self._in_order() if (found := self._place(slot)) is not None]
        self._decode()
        return [self._sample(slot, row) for slot, row in sampled]

    def loss(self, ids: list[int]) -> float:
        """Return minus the log-probability of the tokens after the first, in nats."""
        self._batch.n_tokens = 0
        for place, token in enumerate(ids):
            self._put(token, place, 0, wanted=True)
        self._decode()
        found = 0.0
        for row, token in enumerate(ids[1:]):
            logits = self._logits(row).astype(np.float64)
            most = logits.max()
            found += most + np.log(np.exp(logits - most).sum()) - logits[token]
        self._forget(0)
        return float(found)

    def _decode(self) -> None:
        if lib.llama_decode(self._context, self._batch):
            raise SystemExit("llama.cpp failed to decode")

    def _logits(self, row: int) -> np.ndarray:
        found = lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(found, (self._vocabulary,))

    def _forget(self, slot: int) -> None:
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), slot, -1, -1)

    def _put(self, token: int, position: int, slot: int, *, wanted: bool) -> None:
        """Add a token to the batch; `wanted` are its logits."""
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = slot
        batch.logits[row] = wanted
        batch.n_tokens += 1

    def _in_order(self) -> list[int]:
        """Return the slots, those that decode first; llama.cpp computes neighbours together."""
        return sorted(self._slots, key=lambda slot: (len(self._slots[slot].tokens) > 1, slot))

    def _place(self, slot: int) -> tuple[int, int] | None:
        """Put what fits of a slot into the batch; return (slot, row) where a token is due."""
        sequence, batch = self._slots[slot], self._batch
        count = min(len(sequence.tokens), BUDGET - batch.n_tokens)
        due = count == len(sequence.tokens)
        for place, token in enumerate(sequence.tokens[:count]):
            self._put(token, sequence.position + place, slot, wanted=due and place == count - 1)
        del sequence.tokens[:count]
        sequence.position += count
        return (slot, batch.n_tokens - 1) if due else None

    def _sample(self, slot: int, row: int) -> tuple[int, int]:
        """Find a slot's next token, and free the slot with the last."""
        sequence = self._slots[slot]
        sequence.tokens.append(int(self._logits(row).argmax()))
        sequence.wanted -= 1
        if not sequence.wanted:
            del self._slots[slot]
            heapq.heappush(self._free, slot)
            self._forget(slot)
        return sequence.number, 1


driver = Context
