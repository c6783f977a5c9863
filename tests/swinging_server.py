"""A real `iterscope serve` on a machine whose wall clock swings by an hour each time it is read.

Owns the swing, in the server's process and in the engine's; test_metrics_server.py starts it as a
program. Stands for a clock that is set while requests run: no duration may notice.
"""

import itertools
import sys
import time

from tests import paced_server

HOUR_NS = 3600 * 10**9


def swing() -> None:
    """Let each look at the wall clock be an hour off, to one side and the other."""
    true_ns, sides = time.time_ns, itertools.cycle((HOUR_NS, -HOUR_NS))
    time.time_ns = lambda: true_ns() + next(sides)
    time.time = lambda: time.time_ns() / 1e9


if __name__ in ("__main__", "__mp_main__"):
    swing()

if __name__ == "__main__":
    sys.exit(paced_server.run())
