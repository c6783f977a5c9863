"""A plan in the making: the rows placed so far, and what is left of the step's budgets.

Owns the arithmetic of budgets and the columns of the finished plan. The scheduler fills one draft a
step and seals it; nothing else touches it. Decides nothing: who is placed is the scheduler's.
"""

import numpy as np

from engine.plan import History, Plan
from engine.request import Request
from engine.rows import Vector
from engine.running import Running
from engine.table import Table


class Draft:
    """`left` tokens of the budget remain, `prefill_left` of them for rows of several tokens.

    partials counts rows that leave some of their tokens for a later step.
    """

    __slots__ = ("_chunk_max", "_counts", "_decodes", "left", "partials", "plan", "prefill_left")

    def __init__(self, plan: Plan, *, left: int, prefill_left: int, chunk_max: int) -> None:
        self.plan = plan
        self.left = left
        self.prefill_left = prefill_left
        self.partials = 0
        self._chunk_max = chunk_max
        self._decodes: Vector | None = None  # slots of the first rows, one token each
        self._counts: list[int] = []  # tokens of the rows after them

    def share(self, pending: int) -> int:
        """Return how many of a row's pending tokens this step may compute."""
        if pending == 1:
            return 1 if self.left else 0
        return min(pending, self.left, self.prefill_left, self._chunk_max)

    def place_decodes(self, running: Running, places: Vector) -> None:
        """Put the rows at these places into the batch, one token each, before all others."""
        assert not self.plan.rows, "decodes are placed at once, and first"
        running.copy_to(self.plan, places)
        self._decodes = running.slots[places]
        self.left -= len(places)

    def place(self, request: Request, count: int, pending: int) -> None:
        """Put a row of the next `count` of its pending tokens into the batch."""
        plan = self.plan
        plan.rows.append(request)
        plan.requests.append(request.number)
        plan.block_tables.append(request.blocks)
        plan.sampling.append(request.sampling)
        plan.groups.append(request.group)
        self._counts.append(count)
        self.left -= count
        if pending > 1:
            self.prefill_left -= count
            self.partials += count < pending

    def pass_over(self, request: Request, reason: str) -> None:
        """Record that a request was given nothing although its turn had come."""
        self.plan.passed_over.append(request.number)
        self.plan.passed_over_reasons.append(reason)

    def idle(self, request: Request) -> None:
        """Let a held row of a fixed batch feed its last token again."""
        position = max(0, request.computed - 1)
        self.plan.idle_positions.append(position)
        self.plan.idle_token_ids.append(int(request.tokens[position]))
        self.plan.idle_block_tables.append(request.blocks)

    def seal(self, table: Table, *, histories: bool) -> Plan:
        """Take the placed rows' tokens in flight, fill the plan's columns, return it.

        `histories` says whether any live sequence needs its own: then the rows are looked through.
        """
        plan = self.plan
        if not plan.rows:
            return plan
        step = table.reserve(*self._columns())
        plan.reserved = step
        starts, counts, _, indices, last, blocks = step.columns.tolist()
        plan.start_positions, plan.token_counts = starts, counts
        plan.output_indices, plan.kv_block_counts = indices, blocks
        all_sample = step.sampled == len(counts)
        plan.samples = [True] * len(counts) if all_sample else step.samples.tolist()
        plan.token_ids = self._token_ids(starts, last)
        plan.decode_tokens = step.decode_tokens
        plan.prefill_tokens = len(plan.token_ids) - step.decode_tokens
        if histories:
            plan.histories = [
                History(
                    row=row,
                    tokens=request.tokens,
                    prompt_tokens=request.prompt_tokens,
                    scored=request.scored,
                )
                for row, request in enumerate(plan.rows)
                if not request.is_plain
            ]
        return plan

    def _columns(self) -> tuple[Vector, Vector | None]:
        """Return the rows' slots and token counts, None for one each."""
        decodes, counts = self._decodes, self._counts
        if decodes is None:
            return np.array([row.slot for row in self.plan.rows]), np.array(counts)
        if not counts:
            return decodes, None
        others = [row.slot for row in self.plan.rows[len(decodes) :]]
        return (
            np.concatenate((decodes, others)),
            np.concatenate((np.ones_like(decodes), counts)),
        )

    def _token_ids(self, starts: list[int], last: list[int]) -> list[int]:
        """Return all rows' ids, flat; a decode's is its last known token."""
        decodes, rows = len(self.plan.rows) - len(self._counts), self.plan.rows
        if not self._counts:
            return last
        ids = last[:decodes]
        for request, start, count in zip(
            rows[decodes:], starts[decodes:], self._counts, strict=True
        ):
            ids.extend(request.token_ids(start, count))
        return ids
