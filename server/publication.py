"""The order in which an engine's news reach the bus, although they come over two channels.

Owns what was received and may not be published yet. engine_client.py feeds it. Two rules: the end
of a sequence (and a start, and a fault) comes after the iteration it followed, and an iteration
that admits a sequence comes after that sequence's start. Never waits for a record that was lost.
"""

from collections import deque
from collections.abc import Callable

from engine.messages import Report
from telemetry.records import Iteration, Record, RequestStart

Publish = Callable[[Record, bytes | None], None]


class Publication:
    """Holds records of one generation back until their turn; bounded by what is in flight."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._iterations: deque[tuple[Iteration, bytes]] = deque()
        self._reports: deque[Report] = deque()
        self._through = 0
        self._started: set[int] = set()

    def iteration(self, record: Iteration, payload: bytes) -> None:
        """Take an iteration in, in the order of steps."""
        self._iterations.append((record, payload))
        self._pump()

    def report(self, report: Report) -> None:
        """Take a report's records in, in the order of reports."""
        self._through = max(self._through, report.lost_through_step)
        self._reports.append(report)
        self._pump()

    def close(self) -> None:
        """Publish all that is left: the engine is gone, nothing else will come."""
        while self._reports or self._iterations:
            if self._reports and (
                not self._iterations or self._reports[0].after_step < self._iterations[0][0].step
            ):
                self._publish_report()
            else:
                self._publish_iteration()

    def _pump(self) -> None:
        while True:
            if self._reports and self._reports[0].after_step <= self._through:
                self._publish_report()
            elif self._iterations and self._may_publish(self._iterations[0][0]):
                self._publish_iteration()
            else:
                return

    def _may_publish(self, iteration: Iteration) -> bool:
        """Whether all it admits have been told; merged reports are opened early for that."""
        if self._started.issuperset(iteration.admitted):
            return True
        for report in self._reports:
            self._publish_starts(report.starts)
            if self._started.issuperset(iteration.admitted):
                return True
        return False

    def _publish_starts(self, starts: list[RequestStart]) -> None:
        for start in starts:
            self._started.add(start.request)
            self._publish(start, None)
        starts.clear()

    def _publish_report(self) -> None:
        report = self._reports.popleft()
        self._publish_starts(report.starts)
        for end in report.ends:
            self._started.discard(end.request)
            self._publish(end, None)
        others: list[Record] = [*report.faults, *report.step_models]
        for record in others:
            self._publish(record, None)

    def _publish_iteration(self) -> None:
        record, payload = self._iterations.popleft()
        self._through = max(self._through, record.step)
        self._publish(record, payload)
