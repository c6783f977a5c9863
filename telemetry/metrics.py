"""Prometheus: one thread that folds the record, values put together at each scrape.

Owns the thread, what metric_table.py names and the folds have counted, and the aliases; the text is
exposition.py's. `GET /metrics` calls `exposition`. Must never reset on read, and never show two
figures of different moments.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from telemetry.bus import Bus
from telemetry.exposition import OPENMETRICS, PLAIN, Exposition, Family
from telemetry.fold import Fold, nobody
from telemetry.gpus import Gpus
from telemetry.histogram import Values, labelled
from telemetry.metric_table import METRICS
from telemetry.metric_vllm import vllm_values
from telemetry.objective import Due
from telemetry.records import Delivery, RequestEnd, Run

PERIOD_S = 0.5
DEFAULT_OBJECTIVE = Due(1_000_000_000, 100_000_000)
READERS = ("explain", "history", "metrics", "stream")
NO_EXPORTS = MappingProxyType({"sent": 0, "failed": 0})
Told = float | Values
Tell = Callable[[], Mapping[str, Told]]
"""Tells figures that other parts know, by the metrics' names: the history's, for one."""


def tell_nothing() -> Mapping[str, Told]:
    """Know no figures beside the record's."""
    return MappingProxyType({})


class Exporter(Protocol):
    """Who is told of each sequence that is over, and sends it elsewhere: telemetry/otlp.py."""

    def note(self, end: RequestEnd, delivery: Delivery) -> None:
        """Add a sequence that is over; called from the folding thread."""
        ...

    def counts(self) -> dict[str, int]:
        """Return how many sendings went out, and how many did not."""
        ...

    def stop(self) -> None:
        """Send what is left, and end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The rest of a server, as metrics know it.

    `now_ns` is the clock of the record's instants; without one it stands at the last step.
    """

    now_ns: Callable[[], int] | None = None
    tell: Tell = tell_nothing
    exporter: Exporter | None = None
    gpus: Gpus | None = None


NOTHING_OUTSIDE = Outside()


class Metrics:
    """The fold with its thread, and what a scrape shows of it."""

    def __init__(
        self,
        *,
        bus: Bus,
        model_name: str,
        vllm_aliases: bool = True,
        objective: Due = DEFAULT_OBJECTIVE,
        outside: Outside = NOTHING_OUTSIDE,
    ) -> None:
        self._bus = bus
        self._vllm_aliases = vllm_aliases
        self._outside = outside
        self._fold = Fold(
            bus, objective=objective, over=outside.exporter.note if outside.exporter else nobody
        )
        self._fold_s = 0.0
        self._text = Exposition((model_name, "0"))
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to fold in the background, so that the ring never outruns a rare scrape."""
        self._thread.start()
        if self._outside.gpus is not None:
            self._outside.gpus.start()

    def stop(self) -> None:
        """Stop folding, and send elsewhere what is left; a scrape still works. May take seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
            if self._outside.gpus is not None:
                self._outside.gpus.stop()
        if self._outside.exporter is not None:
            with self._lock:
                self._advance()
            self._outside.exporter.stop()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and content type of /metrics for an Accept header, all of one moment."""
        with self._lock:
            self._advance()
            families = self._families(self._values())
            if "application/openmetrics-text" not in accept:
                return self._text.plain(families), PLAIN
            run = self._fold.run
            zero_unix_us = run.started_unix_us if run else 0
            return self._text.openmetrics(families, zero_unix_us=zero_unix_us), OPENMETRICS

    def _live(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                with self._lock:
                    self._advance()
            except Exception:
                logging.getLogger("iterscope.metrics").exception("a record could not be folded")

    def _advance(self) -> None:
        began_s = time.thread_time()
        try:
            self._fold.advance()
        finally:
            self._fold_s += time.thread_time() - began_s

    def _values(self) -> dict[str, Values]:
        fold = self._fold
        none, exporter = dict.fromkeys(READERS, 0), self._outside.exporter
        now_ns = self._outside.now_ns
        values = fold.values(now_ns() if now_ns else None)
        values |= {
            "iterscope_engine_starts_total": {(): self._bus.generation},
            "iterscope_telemetry_lost_total": labelled(
                none | self._bus.losses() | {"engine": fold.iterations_lost}
            ),
            "iterscope_telemetry_readers": labelled(none | self._bus.readers()),
            "iterscope_metrics_fold_seconds_total": {(): self._fold_s},
            "iterscope_otlp_exports_total": labelled(exporter.counts() if exporter else NO_EXPORTS),
        }
        if fold.run is not None:
            values |= _run_values(fold.run)
        if self._outside.gpus is not None:
            values |= self._outside.gpus.values()
        for name, told in self._outside.tell().items():
            values[name] = {(): told} if isinstance(told, int | float) else told
        if self._vllm_aliases:
            values |= vllm_values(values, fold.last.admission_stop if fold.last else "no_waiting")
        return values

    def _families(self, values: Mapping[str, Values]) -> Iterator[Family]:
        for spec in METRICS:
            if spec.name not in values:
                continue
            yield Family(spec.name, spec, values[spec.name])
            if self._vllm_aliases:
                for alias in spec.aliases:
                    yield Family(alias, spec, values[spec.name])


def _run_values(run: Run) -> dict[str, Values]:
    """Return what an engine is, in labels."""
    config = json.loads(run.config)
    cached = config.get("enable_prefix_caching", True)
    kept = config.get("kv_cache_dtype", run.dtype)
    what = (run.revision, run.policy, run.batching, run.backend, run.dtype, run.device)
    cache = (str(run.block_tokens), str(run.kv_blocks_total), kept, str(cached))
    return {
        "iterscope_info": {what: 1},
        "iterscope_cache_config_info": {cache: 1},
    }
