"""How long the queue's oldest waits, and whether it is overtaken: what starvation looks like.

Owns since when preempted sequences wait and whom a later arrival overtook; fold.py feeds it the
steps that admit or preempt, metrics.py reads `values`. A sequence that was never admitted has been
overtaken exactly if one that arrived later was admitted, so one instant tells it of all.
"""

from collections.abc import Mapping, Set

from telemetry.histogram import Values
from telemetry.records import Iteration, RequestStart


class QueueFold:
    """Who waits since when. `live` is fold.py's own, looked at and never changed."""

    def __init__(self, live: Mapping[int, RequestStart]) -> None:
        self._live = live
        self._preempted_at_ns: dict[int, int] = {}
        self._overtaken: set[int] = set()  # of those preempted
        self._latest_admitted_ns = -1  # the latest arrival that was ever admitted

    def take(self, record: Iteration) -> None:
        """Take in who was preempted and who admitted by a step."""
        for request in record.preempted:
            self._preempted_at_ns[request] = record.end_at_ns
        for request in record.admitted:
            self.forget(request)
            start = self._live.get(request)
            if start is None:
                continue
            self._latest_admitted_ns = max(self._latest_admitted_ns, start.arrived_at_ns)
            for waiting in self._preempted_at_ns:
                other = self._live.get(waiting)
                if other is not None and other.arrived_at_ns < start.arrived_at_ns:
                    self._overtaken.add(waiting)

    def forget(self, request: int) -> None:
        """Forget a sequence that does not wait any more."""
        self._preempted_at_ns.pop(request, None)
        self._overtaken.discard(request)

    def restart(self) -> None:
        """Begin with another engine, to which everybody comes anew."""
        self._preempted_at_ns.clear()
        self._overtaken.clear()
        self._latest_admitted_ns = -1

    def values(self, waiting: Set[int], now_ns: int) -> dict[str, Values]:
        """Return what the table names of the queue, in which these wait."""
        oldest_ns = overtaken_ns = now_ns
        for request in waiting:
            start = self._live[request]
            since_ns = self._preempted_at_ns.get(request)
            if since_ns is None:
                since_ns = start.arrived_at_ns
                late = start.arrived_at_ns < self._latest_admitted_ns
            else:
                late = request in self._overtaken
            oldest_ns = min(oldest_ns, since_ns)
            if late:
                overtaken_ns = min(overtaken_ns, since_ns)
        return {
            "iterscope_queue_oldest_seconds": {(): (now_ns - oldest_ns) / 1e9},
            "iterscope_overtaken_wait_seconds": {(): (now_ns - overtaken_ns) / 1e9},
        }
