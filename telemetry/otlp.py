"""Metrics over OTLP: the three that OpenTelemetry defines for model servers, pushed to a receiver.

Owns their names, buckets and attributes (semantic conventions for generative AI, model servers) and
the exporting thread, which is the SDK's. Needs the extra `otel`; server/metering.py imports it only
when --otlp-endpoint is given. metrics.py's folding thread notes each sequence that is over. Must
never make serving wait: a receiver that is down costs a timeout of that one thread, sums are kept
in memory, and attributes have few values.
"""

import logging
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from telemetry.records import Delivery, RequestEnd

DURATION_EDGES_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
FIRST_EDGES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
EACH_EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""The boundaries that the conventions give."""

EXPORT_S = 10.0
STOP_S = 3.0
PATH = "/v1/metrics"


class Otlp:
    """The three histograms, and who sends them each `interval_s`."""

    def __init__(
        self, endpoint: str, *, interval_s: float, attributes: Mapping[str, str | int], replica: str
    ) -> None:
        self._attributes = dict(attributes)
        self._exporter = _Counted(_receiver(endpoint))
        resource = {
            "service.name": "iterscope",
            "service.version": version("iterscope"),
            "service.instance.id": replica,
        }
        self._provider = MeterProvider(
            [
                PeriodicExportingMetricReader(
                    self._exporter,
                    export_interval_millis=1e3 * interval_s,
                    export_timeout_millis=1e3 * EXPORT_S,
                )
            ],
            Resource.create(resource),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("iterscope", version("iterscope"))
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="HTTP request read to last byte written, one value a sequence.",
            explicit_bucket_boundaries_advisory=DURATION_EDGES_S,
        )
        self._first = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="HTTP request read to first byte of output written, where served.",
            explicit_bucket_boundaries_advisory=FIRST_EDGES_S,
        )
        self._each = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="The rest of the duration over the tokens after the first, where served.",
            explicit_bucket_boundaries_advisory=EACH_EDGES_S,
        )

    def note(self, end: RequestEnd, delivery: Delivery) -> None:
        """Add a sequence that is over."""
        chat = end.request_id.startswith("chatcmpl-")
        attributes = self._attributes | {
            "gen_ai.operation.name": "chat" if chat else "text_completion"
        }
        last_ns = delivery.last_write_at_ns or end.released_at_ns
        duration_s = (last_ns - delivery.received_at_ns) / 1e9
        if end.finish not in {"stop", "length"}:
            cause = f"cancelled_{end.cancel_cause}" if end.cancel_cause else "error"
            self._duration.record(duration_s, attributes | {"error.type": cause})
            return
        self._duration.record(duration_s, attributes)
        if delivery.first_write_at_ns is not None:
            first_s = (delivery.first_write_at_ns - delivery.received_at_ns) / 1e9
            self._first.record(first_s, attributes)
            if end.output_tokens > 1:
                self._each.record((duration_s - first_s) / (end.output_tokens - 1), attributes)

    def counts(self) -> dict[str, int]:
        """Return how many exports went out, and how many did not."""
        return {"sent": self._exporter.sent, "failed": self._exporter.failed}

    def stop(self) -> None:
        """Send what is left, if that takes no longer than a moment."""
        # The SDK waits for its own retries here, which may take longer than a server's end may.
        ending = threading.Thread(target=self._provider.shutdown, name="otlp-end", daemon=True)
        ending.start()
        ending.join(STOP_S)


class _Counted(MetricExporter):
    """An exporter that counts, and says once that its receiver is gone, once that it is back."""

    def __init__(self, exporter: OTLPMetricExporter) -> None:
        super().__init__()
        self._exporter = exporter
        self._log = logging.getLogger("iterscope.otlp")
        self._works = True
        self.sent = 0
        self.failed = 0

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send one collection."""
        result = self._exporter.export(metrics_data, timeout_millis, **kwargs)
        works = result is MetricExportResult.SUCCESS
        if works:
            self.sent += 1
        else:
            self.failed += 1
        if works is not self._works:
            self._works = works
            say = "are sent again" if works else "could not be sent; trying on"
            self._log.warning("metrics over OTLP %s", say)
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Send what the exporter holds back: nothing."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """End it."""
        self._exporter.shutdown(timeout_millis, **kwargs)


def _receiver(endpoint: str) -> OTLPMetricExporter:
    """Return the exporter to a receiver, named with or without the path of metrics."""
    # Its own log lines, one each try, would drown the server's: ours say the same once.
    for name in ("opentelemetry.exporter", "opentelemetry.sdk.metrics"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    url = endpoint.rstrip("/")
    return OTLPMetricExporter(url if url.endswith(PATH) else url + PATH, timeout=EXPORT_S)
