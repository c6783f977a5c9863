"""Metrics over OTLP, to a real receiver: an HTTP server that decodes the protobuf it is sent.

Owns the proofs of telemetry/otlp.py: names, buckets and attributes as the conventions have them,
the sums of what was served, and a server that does not care whether anybody listens.
"""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from engine.config import ConfigError
from server import metering
from server.config import ServerConfig
from telemetry.config import TelemetryConfig, TelemetryConfigError, check
from telemetry.otlp import Otlp
from tests import samples, tiny
from tests.histories import wait_for
from tests.servers import serving

SECOND = 1_000_000_000
DURATION = "gen_ai.server.request.duration"
FIRST = "gen_ai.server.time_to_first_token"
EACH = "gen_ai.server.time_per_output_token"
EDGES = {
    DURATION: [0.01 * 2**power for power in range(14)],
    FIRST: [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
        *(7.5, 10.0),
    ],
    EACH: [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
}


@dataclass
class Received:
    """What a receiver was sent: the newest state of each series, and of whom."""

    url: str = ""
    paths: set[str] = field(default_factory=set)
    resource: dict[str, Any] = field(default_factory=dict)
    points: dict[tuple[str, frozenset[tuple[str, Any]]], Any] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def take(self, path: str, request: ExportMetricsServiceRequest) -> None:
        self.paths.add(path)
        for of_resource in request.resource_metrics:
            self.resource = values_of(of_resource.resource.attributes)
            for scope in of_resource.scope_metrics:
                for metric in scope.metrics:
                    self.units[metric.name] = metric.unit
                    for point in metric.histogram.data_points:
                        labels = frozenset(values_of(point.attributes).items())
                        self.points[metric.name, labels] = point

    def count(self, name: str, **wanted: Any) -> int:
        labels = {key.replace("_", ".", 1): value for key, value in wanted.items()}
        return sum(
            point.count
            for (own, has), point in self.points.items()
            if own == name and labels.items() <= dict(has).items()
        )


def values_of(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = getattr(one.value, kind)
    return found


@contextmanager
def receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            received.take(self.path, ExportMetricsServiceRequest.FromString(body))
            answer = ExportMetricsServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        received.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield received
        finally:
            http.shutdown()
            thread.join()


ATTRIBUTES: dict[str, str | int] = {
    "gen_ai.provider.name": "iterscope",
    "gen_ai.request.model": "tiny",
    "server.port": 8000,
}


def test_the_conventions_names_buckets_and_attributes() -> None:
    with receiver() as received:
        otlp = Otlp(received.url, interval_s=60, attributes=ATTRIBUTES, replica="a")
        times = {"received_at_ns": 0, "first_write_at_ns": SECOND // 5, "last_write_at_ns": SECOND}
        delivery = samples.delivery(1, **times)
        for prefix, changed in (
            ("chatcmpl", {"output_tokens": 9}),
            ("cmpl", {"output_tokens": 1}),
            ("cmpl", {"finish": "error"}),
            ("cmpl", {"finish": "cancelled", "cancel_cause": "client"}),
        ):
            otlp.note(samples.end(1, **({"request_id": f"{prefix}-1"} | changed)), delivery)
        otlp.stop()
        assert otlp.counts() == {"sent": 1, "failed": 0}
    assert received.paths == {"/v1/metrics"}
    assert received.resource["service.name"] == "iterscope"
    assert received.resource["service.instance.id"] == "a"
    assert received.units == dict.fromkeys(EDGES, "s")
    for (name, labels), point in received.points.items():
        assert list(point.explicit_bounds) == pytest.approx(EDGES[name])
        assert ATTRIBUTES.items() <= dict(labels).items()
        assert dict(labels)["gen_ai.operation.name"] in ("chat", "text_completion")
    assert received.count(DURATION) == 4
    assert received.count(DURATION, error_type="error") == 1
    assert received.count(DURATION, error_type="cancelled_client") == 1
    assert received.count(FIRST) == 2, "where it was served"
    assert received.count(EACH) == 1, "one token has none after it"
    (each,) = [point for (name, _), point in received.points.items() if name == EACH]
    assert each.sum == pytest.approx(0.8 / 8)


def test_nobody_listens_and_nothing_waits() -> None:
    with receiver() as gone:
        pass
    otlp = Otlp(gone.url + "/v1/metrics", interval_s=0.1, attributes=ATTRIBUTES, replica="a")
    delivery = samples.delivery(1, first_write_at_ns=SECOND, last_write_at_ns=SECOND)
    for request in range(5000):
        otlp.note(samples.end(request), delivery)
    otlp.stop()
    assert otlp.counts()["sent"] == 0


def test_a_server_sends_what_it_served(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    with receiver() as received:
        flags = ("--otlp-endpoint", received.url, "--otlp-interval-s", "0.2")
        with serving(tmp_path, model, *flags, parrot=True) as server:
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            for _ in range(3):
                assert server.post("/v1/completions", body).status_code == 200
            wait_for(lambda: received.count(EACH) == 3)
            server.wait(lambda: server.metric("iterscope_otlp_exports_total", outcome="sent") >= 1)
            assert server.metric("iterscope_otlp_exports_total", outcome="failed") == 0
            assert server.post("/v1/completions", body).status_code == 200
            assert server.stop() == 0
        assert received.count(DURATION) == 4, "what came last is sent at the end"
        names = {dict(labels)["gen_ai.operation.name"] for _, labels in received.points}
        assert names == {"text_completion"}


def test_a_server_whose_receiver_is_gone_serves_and_ends(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    with receiver() as gone:
        pass
    flags = ("--otlp-endpoint", gone.url, "--otlp-interval-s", "0.1")
    with serving(tmp_path, model, *flags, parrot=True) as server:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", body).status_code == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_what_cannot_be_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("localhost:4318", "ftp://a", "http://"):
        with pytest.raises(TelemetryConfigError, match="--otlp-endpoint must be an http or https"):
            check(TelemetryConfig(otlp_endpoint=endpoint))
    config = ServerConfig(telemetry=TelemetryConfig(otlp_endpoint="http://localhost:4318"))
    metering.check_extra(config)
    monkeypatch.setattr(metering, "EXTRA_MODULE", "not_installed_here")
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'iterscope\[otel\]'"):
        metering.check_extra(config)
    metering.check_extra(ServerConfig())
