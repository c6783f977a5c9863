"""A plan in the making: the rows placed so far, and what is left of the step's budgets.

Owns the arithmetic of budgets and the columns of the finished plan. The scheduler fills one draft a
step and seals it; nothing else touches it. Decides nothing: who is placed is the scheduler's.
"""

from operator import attrgetter

from engine.plan import History, Plan
from engine.request import Request

NUMBER, EPOCH = attrgetter("number"), attrgetter("epoch")
BLOCKS, SAMPLING = attrgetter("blocks"), attrgetter("sampling")


class Draft:
    """`left` tokens of the budget remain, `prefill_left` of them for rows of several tokens.

    partials counts rows that leave some of their tokens for a later step.
    """

    __slots__ = ("_chunk_max", "left", "partials", "plan", "prefill_left", "rows")

    def __init__(self, plan: Plan, *, left: int, prefill_left: int, chunk_max: int) -> None:
        self.plan = plan
        self.rows: list[Request] = []
        self.left = left
        self.prefill_left = prefill_left
        self.partials = 0
        self._chunk_max = chunk_max

    def share(self, pending: int) -> int:
        """Return how many of a row's pending tokens this step may compute."""
        if pending == 1:
            return 1 if self.left else 0
        return min(pending, self.left, self.prefill_left, self._chunk_max)

    def place(self, request: Request, start: int, count: int, pending: int) -> None:
        """Put a row of `count` tokens from position `start` into the batch."""
        self.rows.append(request)
        self.plan.start_positions.append(start)
        self.plan.token_counts.append(count)
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
        self.plan.idle_token_ids.append(request.tokens[position])
        self.plan.idle_block_tables.append(request.blocks)

    def seal(self, *, groups: bool, histories: bool) -> Plan:
        """Fill the columns of the placed rows, take their tokens in flight, return the plan.

        `histories` says whether any live sequence needs its own: then the rows are looked through.
        """
        plan, rows = self.plan, self.rows
        plan.requests = list(map(NUMBER, rows))
        plan.epochs = list(map(EPOCH, rows))
        plan.block_tables = list(map(BLOCKS, rows))
        plan.kv_block_counts = list(map(len, plan.block_tables))
        plan.sampling = list(map(SAMPLING, rows))
        if groups:
            plan.groups = [request.group for request in rows]
        if histories:
            plan.histories = [
                History(
                    row=row,
                    tokens=request.tokens,
                    prompt_tokens=request.prompt_tokens,
                    scored=request.scored,
                )
                for row, request in enumerate(rows)
                if not request.is_plain
            ]
        token_ids, decode_tokens = plan.token_ids, 0
        indices, samples = plan.output_indices, plan.samples
        for request, start, count in zip(
            rows, plan.start_positions, plan.token_counts, strict=True
        ):
            end, known, tokens = start + count, request.known, request.tokens
            indices.append(known - request.prompt_tokens)
            if count == 1 and start < len(tokens):
                token_ids.append(tokens[start])
            else:
                token_ids.extend(request.token_ids(start, count))
            # By position: below the highest computed is recompute, below the prompt's end
            # prefill, else decode; one row may hold more than one kind.
            if start >= request.highest and start >= request.prompt_tokens:
                decode_tokens += count
            else:
                decode_from = max(request.highest, request.prompt_tokens)
                decode_tokens += max(0, end - decode_from)
            request.planned = end
            request.flights += 1
            request.iterations += 1
            if end == known:
                samples.append(True)
                request.known = known + 1
            else:
                samples.append(False)
        plan.decode_tokens = decode_tokens
        plan.prefill_tokens = len(token_ids) - decode_tokens
        return plan
