"""Prometheus: one thread that folds the record, values built at each scrape.

Owns the collector, with a registry of its own, of what metric_table.py names and the folds have
counted. `GET /metrics` calls `exposition`. Must never reset on read, never use the library's global
registry, and never show two figures of different moments.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from telemetry.bus import Bus
from telemetry.fold import Fold
from telemetry.histogram import Histogram, Values, labelled
from telemetry.metric_spec import (
    BASE_LABELS,
    LATENCY_EDGES_S,
    TTFT_EDGES_S,
    VLLM_PREFIX,
    MetricSpec,
)
from telemetry.metric_table import METRICS

PERIOD_S = 0.25

VLLM_REASONS = MappingProxyType(
    {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
)
"""Our finish to vLLM's finished_reason."""

NO_LOSSES = MappingProxyType({"engine": 0, "history": 0, "metrics": 0, "stream": 0})
"""Where records may be lost: each is shown as 0 before the first."""

NO_SOURCES: Mapping[str, Callable[[], float]] = MappingProxyType({})


class Metrics:
    """The fold with its thread, and the registry that shows it.

    `sources` give metrics without labels that other parts know, by name: the history's, for one.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        model_name: str,
        vllm_names: bool = True,
        sources: Mapping[str, Callable[[], float]] = NO_SOURCES,
    ) -> None:
        self._bus = bus
        self._base = (model_name, "0")
        self._prefix = VLLM_PREFIX if vllm_names else "iterscope_"
        self._sources = sources
        self._fold = Fold(bus, ttft_edges=TTFT_EDGES_S, e2e_edges=LATENCY_EDGES_S)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="metrics", daemon=True)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def start(self) -> None:
        """Begin to fold in the background, so that the ring never outruns a rare scrape."""
        self._thread.start()

    def stop(self) -> None:
        """Stop folding; a scrape still works."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and content type of /metrics for an Accept header."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # The library's default escaping turns the colon of `vllm:` into an underscore here, in
        # samples only; every name of ours is legal as it stands.
        body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self._registry, escaping=openmetrics.ALLOWUTF8, version="1.0.0"
        )
        return body, openmetrics.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield every family, all of one moment: called by the registry at a scrape."""
        with self._lock:
            self._fold.advance()
            values = self._values()
            families = [self._family(s, values[s.name]) for s in METRICS if s.name in values]
        yield from families

    def _live(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                with self._lock:
                    self._fold.advance()
            except Exception:
                logging.getLogger("iterscope.metrics").exception("a record could not be folded")

    def _values(self) -> dict[str, Values]:
        fold = self._fold
        lost = NO_LOSSES | self._bus.losses() | {"engine": fold.iterations_lost}
        values: dict[str, Values] = {
            "vllm:num_requests_running": {(): fold.running},
            "vllm:num_requests_waiting": {(): fold.waiting},
            "vllm:kv_cache_usage_perc": {(): fold.kv_usage},
            "vllm:gpu_cache_usage_perc": {(): fold.kv_usage},
            "vllm:time_to_first_token_seconds": {(): fold.ttft_s},
            "vllm:e2e_request_latency_seconds": {(): fold.e2e_s},
            "vllm:prompt_tokens_total": {(): fold.prompt_tokens},
            "vllm:generation_tokens_total": {(): fold.generation_tokens},
            "vllm:request_success_total": {
                (VLLM_REASONS[finish],): count for finish, count in fold.ends_by_finish.items()
            },
            "vllm:num_preemptions_total": {(): fold.preemptions},
            "iterscope_iterations_total": {(): fold.iterations},
            "iterscope_admission_stops_total": labelled(fold.stops_by_reason),
            "iterscope_requests_accepted_total": {(): fold.accepted},
            "iterscope_requests_ended_total": labelled(
                fold.ends_by_finish | {"unknown": fold.ends_unknown}
            ),
            "iterscope_requests_rejected_total": labelled(fold.rejections_by_reason),
            "iterscope_faults_total": {(): fold.faults},
            "iterscope_telemetry_lost_total": labelled(lost),
            "iterscope_telemetry_readers": labelled(self._bus.readers()),
        }
        values |= fold.steps.values(fold.run, kv_used=fold.kv_used) | fold.requests.values()
        if fold.run is not None:
            run = fold.run
            cache = (str(run.block_tokens), str(run.kv_blocks_total), run.dtype)
            values["vllm:cache_config_info"] = {cache: 1}
        for name, source in self._sources.items():
            values[name] = {(): source()}
        return values

    def _family(self, spec: MetricSpec, values: Values) -> Metric:
        name = spec.name.replace(VLLM_PREFIX, self._prefix)
        labels = (*BASE_LABELS, *spec.labels)
        if spec.type == "histogram":
            histogram = HistogramMetricFamily(name, spec.help, labels=labels)
            for extra, value in values.items():
                assert isinstance(value, Histogram)
                histogram.add_metric((*self._base, *extra), _cumulative(value), value.sum)
            return histogram
        kind = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
        family = kind(name, spec.help, labels=labels)
        for extra, value in values.items():
            assert not isinstance(value, Histogram)
            family.add_metric((*self._base, *extra), value)
        return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for edge, count in zip((*histogram.edges, float("inf")), histogram.counts, strict=True):
        total += count
        shown: str = floatToGoString(edge)  # type: ignore[no-untyped-call]
        buckets.append((shown, float(total)))
    return buckets
