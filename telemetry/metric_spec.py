"""What the entry of a metric is made of, and the bucket edges that histograms share.

Owns MetricSpec and the edges; the tables metric_*.py are made of them and the folds observe by
them. vLLM's edges are all there, with finer ones below. Holds no metric and no value.
"""

from dataclasses import dataclass
from typing import Literal

FINE_EDGES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
TTFT_EDGES_S = (
    *(0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2),
    *(0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
    *(640.0, 2560.0),
)
PHASE_EDGES_S = (
    *FINE_EDGES_S,
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
GAP_EDGES_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PER_PROMPT_TOKEN_EDGES_S = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005),
    *(*FINE_EDGES_S, 0.5, 1.0),
)
STEP_TOKEN_EDGES = tuple(float(n) for n in (1, 2, 4, *(2**power for power in range(3, 15))))
ROW_EDGES = tuple(float(2**power) for power in range(11))
CONTEXT_EDGES = tuple(float(4**power) for power in range(2, 12))
LENGTH_EDGES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SIBLING_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0)

BASE_LABELS = ("model_name", "engine")
EXPLAIN = "explain"
"""As a metric's query: its exemplars name requests that `iterscope explain` tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric family. `labels` come after model_name and engine, which all carry.

    `aliases` are vLLM's names of the same; `query` is the named query that explains it.
    """

    name: str
    type: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = ""
    query: str = ""
    aliases: tuple[str, ...] = ()
