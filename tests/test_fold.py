"""A fold that the ring overruns: counts and live set stay of one moment.

GIVEN a ring far too small, WHEN its publisher overtakes the reader anywhere, THEN accepted is ended
plus running plus waiting after every advance.
"""

import sys
import threading

from telemetry.bus import Bus, Entry
from telemetry.fold import Fold
from telemetry.metrics import DEFAULT_OBJECTIVE
from tests import samples


def test_a_fold_that_is_overrun_while_it_reads_still_keeps_the_identity() -> None:
    bus = Bus(run_id="r", capacity=8)
    fold = Fold(bus, objective=DEFAULT_OBJECTIVE)
    done = threading.Event()
    wrong: list[tuple[int, int, int, int]] = []
    folded = 0

    def advance() -> None:
        nonlocal folded
        while not done.is_set():
            fold.advance()
            figures = (fold.accepted, fold.ended, fold.running, fold.waiting)
            if figures[0] != sum(figures[1:]):
                wrong.append(figures)
            folded += 1

    thread = threading.Thread(target=advance)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # change threads as often as can be
    try:
        thread.start()
        for request in range(4000):
            bus.publish(samples.start(request))
            if request >= 3:
                bus.publish(samples.end(request - 3))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    fold.advance()
    assert (fold.accepted, fold.ended, fold.waiting) == (4000, 3997, 3)
    assert bus.losses()["metrics"], "the test never overran the ring"
    assert folded
    assert not wrong


class OverrunBus(Bus):
    """A bus whose publisher, once, goes once around the ring just before a window is copied."""

    overruns = 1

    def _window(self, start: int, count: int) -> list[Entry | None]:
        if self.overruns:
            self.overruns -= 1
            for request in range(100, 100 + self.capacity):
                self.publish(samples.start(request))
        return super()._window(start, count)


def test_a_window_lost_as_a_whole_leaves_counts_and_gauges_of_one_moment() -> None:
    bus = OverrunBus(run_id="r", capacity=4)
    fold = Fold(bus, objective=DEFAULT_OBJECTIVE)
    for request in range(4):
        bus.publish(samples.start(request))
    fold.advance()
    assert bus.losses()["metrics"] == 4
    assert (fold.accepted, fold.ended, fold.waiting) == (8, 0, 8)
