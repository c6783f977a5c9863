"""What the rows of steps add to the totals: gaps between tokens, tokens computed again, goodput.

Owns the sums over rows; fold.py feeds it each iteration in order. Rows that decode as in the step
before are observed together; only those that begin, return or were passed over cost one each. Must
never keep more of a sequence than its last commit, and forgets it at its end.
"""

from collections.abc import Callable, Iterable, Sequence

from telemetry.fold_objectives import ObjectiveFold
from telemetry.histogram import Histogram
from telemetry.metric_spec import GAP_EDGES_S
from telemetry.records import Iteration

Known = Callable[[int], tuple[int, int, str]]
"""A sequence to its prompt length, the first position of it that was never computed, its id."""


class TokenFold:
    """Sums over the rows of a run's iterations."""

    def __init__(self, objectives: ObjectiveFold) -> None:
        self._objectives = objectives
        self._token_at_ns: dict[int, int] = {}  # of those that decode
        self._held_at_ns: dict[int, int] = {}  # of those that give none at present
        self._last_end_at_ns = -1
        self.gaps_s = Histogram(GAP_EDGES_S)
        self.recomputed_tokens = 0

    def take(self, record: Iteration, positions: Sequence[int], known: Known) -> None:
        """Add one iteration; `positions` is where each row ended.

        A row gives a token when it reaches past its prompt and everything computed before: what a
        preemption lost and is computed again gives none, so that its wait counts as one gap.
        """
        rows, end_at_ns, token_at_ns = record.requests, record.end_at_ns, self._token_at_ns
        for request in record.preempted:
            if request in token_at_ns:
                self._held_at_ns[request] = token_at_ns.pop(request)
        last_ns, before = self._last_end_at_ns, [*map(token_at_ns.get, rows)]
        going_on = before.count(last_ns)
        token_at_ns.update(dict.fromkeys(rows, end_at_ns))
        if going_on:
            name = known(rows[before.index(last_ns)])[2]
            decoding = zip(rows, positions, before, strict=True)
            self.steady(
                name,
                going_on,
                end_at_ns,
                ((one, at) for one, at, was in decoding if was == last_ns),
            )
        self._last_end_at_ns = end_at_ns
        if going_on < len(rows):
            for index, at_ns in enumerate(before):
                if at_ns == last_ns:
                    continue
                if at_ns is not None:  # passed over, or preempted in a step that was lost
                    self._held_at_ns[rows[index]] = at_ns
                self._begin(record, index, positions[index], known(rows[index]))

    def steady(
        self, name: str, count: int, end_at_ns: int, rows: Iterable[tuple[int, int]]
    ) -> None:
        """Add the tokens of so many sequences that gave one in the step before, `name` among them.

        `rows` are these and their positions, and read only if one of them may be late.
        """
        gap_s = (end_at_ns - self._last_end_at_ns) / 1e9
        self.gaps_s.observe_of(name, gap_s, end_at_ns, count)
        if self._objectives.safe(end_at_ns):
            self._objectives.met(count)
        else:
            self._objectives.decoded(rows, end_at_ns)
        self._last_end_at_ns = end_at_ns

    def settle(self, rows: Sequence[int]) -> None:
        """Note that these gave a token in the step that was added last."""
        self._token_at_ns.update(dict.fromkeys(rows, self._last_end_at_ns))

    def _begin(
        self, record: Iteration, index: int, position: int, known: tuple[int, int, str]
    ) -> None:
        """Take a row that computes its prompt, its first token, again what it lost, or returns."""
        request = record.requests[index]
        prompt, highest, name = known
        if position < prompt or position <= highest:
            del self._token_at_ns[request]
        else:
            held_at_ns = self._held_at_ns.pop(request, None)
            if held_at_ns is not None:
                gap_s = (record.end_at_ns - held_at_ns) / 1e9
                self.gaps_s.observe_of(name, gap_s, record.end_at_ns)
            self._objectives.joined(request, position, record.end_at_ns)
        start = record.start_positions[index]
        self.recomputed_tokens += max(0, min(position, highest) - start)

    def forget(self, request: int) -> None:
        """Forget a sequence that ended."""
        self._token_at_ns.pop(request, None)
        self._held_at_ns.pop(request, None)

    def restart(self) -> None:
        """Begin with another engine, which has none of the sequences so far."""
        self._token_at_ns.clear()
        self._held_at_ns.clear()
        self._last_end_at_ns = -1
