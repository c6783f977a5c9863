"""A real Prometheus, a real Alertmanager and a webhook on loopback, each on a free port, for tests.

Owns their configuration with intervals short enough for a test, their start, questions and end.
Tests of metrics, dashboards and alerts use it. Every wait has a deadline, and a program that dies
or misses one fails the test with its log. Nothing is left behind, on disk or among processes.
"""

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.servers import START_S, WAIT_S, Server, answers

JOB = "iterscope"
EVERY_S = 0.25
"""Between two scrapes, and between two evaluations of the rules."""
WINDOW = "30s"
"""A window of `rate` in a test: many scrapes, and still within it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Prometheus(Server):
    """A running Prometheus."""

    def api(self, path: str, **parameters: str | float) -> Any:
        """Return the data of an answer of /api/v1; fails with Prometheus' own words."""
        response = httpx.get(
            f"{self.url}/api/v1/{path}", params=parameters, timeout=WAIT_S, verify=False
        )
        answer = response.json()
        assert answer["status"] == "success", f"{path} {parameters}: {answer}"
        return answer["data"]

    def query(self, expression: str, **parameters: str | float) -> list[Sample]:
        """Return what an expression is now (or at `time`): its vector, a scalar as one sample."""
        data = self.api("query", query=expression, **parameters)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        assert data["resultType"] == "vector", data["resultType"]
        return [Sample(one["metric"], float(one["value"][1])) for one in data["result"]]

    def value(self, expression: str) -> float:
        """Return the one value that an expression is now; not a number if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return found[0].value if found else math.nan

    def wait_scraped(self, metric: str = "up", deadline_s: float = WAIT_S) -> None:
        """Wait until every target is up and a metric of it is there."""

        def scraped() -> bool:
            ups = self.query(f'up{{job="{JOB}"}}')
            return bool(ups) and all(one.value for one in ups) and bool(self.query(metric))

        self.wait(scraped, deadline_s)

    def wait_scrapes(self, count: int, deadline_s: float = WAIT_S) -> None:
        """Wait until each target was scraped so many times more, and rules had their turn."""
        begin = time.time()

        def enough() -> bool:
            since = round((time.time() - begin) * 1000) + 1
            counted = self.query(f'count_over_time(up{{job="{JOB}"}}[{since}ms])')
            return bool(counted) and all(one.value >= count for one in counted)

        self.wait(enough, deadline_s)

    def firing(self, alert: str) -> list[Mapping[str, str]]:
        """Return the labels of each instance of an alert that fires now."""
        expression = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
        return [one.labels for one in self.query(expression) if one.value]


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """What an Alertmanager sent, in order; the list grows while a test looks."""

    url: str
    messages: list[dict[str, Any]]

    def alerts(self, status: str) -> list[dict[str, Any]]:
        """Return all alerts that came with a status: firing or resolved."""
        every = [alert for message in list(self.messages) for alert in message["alerts"]]
        return [alert for alert in every if alert["status"] == status]


@contextmanager
def prometheus(
    folder: Path,
    targets: Sequence[str],
    *,
    rules: Sequence[Path] = (),
    alertmanager: str | None = None,
    every_s: float = EVERY_S,
) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes the servers at these URLs, and stop it at the end.

    `rules` are files of rules; `alertmanager` is the URL of one. It is ready when it is given, but
    tells itself of its targets every 5 s alone: the first scrape comes after that long.
    """
    every = f"{round(every_s * 1000)}ms"
    config: dict[str, Any] = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {
                "job_name": JOB,
                "scrape_timeout": every,
                "static_configs": [{"targets": [_address(url) for url in targets]}],
            }
        ],
    }
    if alertmanager is not None:
        peers = [{"targets": [_address(alertmanager)]}]
        config["alerting"] = {"alertmanagers": [{"static_configs": peers}]}
    with _started(
        folder,
        "prometheus",
        config,
        "--enable-feature=exemplar-storage",
        data="--storage.tsdb.path",
    ) as server:
        yield Prometheus(process=server.process, log_file=server.log_file, url=server.url)


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[Server]:
    """Start an Alertmanager that tells every alert to a webhook at once, and stop it at the end."""
    config = {
        "route": {
            "receiver": "test",
            "group_by": ["alertname"],
            "group_wait": "50ms",
            "group_interval": "200ms",
            "repeat_interval": "1h",
        },
        "receivers": [
            {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
        ],
    }
    # An address for the cluster would open a second port, and wait for peers.
    with _started(
        folder,
        "prometheus-alertmanager",
        config,
        "--cluster.listen-address=",
        data="--storage.path",
    ) as server:
        yield server


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Listen for an Alertmanager's messages until the block ends."""
    messages: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Webhook(url=f"http://127.0.0.1:{listening.server_port}/", messages=messages)
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@contextmanager
def _started(
    folder: Path, program: str, config: Mapping[str, Any], *flags: str, data: str
) -> Iterator[Server]:
    """Run a program of Prometheus' family; `data` is its flag for the folder of what it keeps."""
    executable = shutil.which(program)
    assert executable, f"{program} is missing: `make test` says how to install it"
    place = folder / f"{program}-{time.monotonic_ns()}"
    place.mkdir(parents=True)
    (place / "config.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    log_file = place / "log"
    command = [
        *(executable, f"--config.file={place / 'config.yml'}", f"{data}={place / 'data'}"),
        *("--web.listen-address=127.0.0.1:0", "--log.format=json", *flags),
    ]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Server(process=process, log_file=log_file, url="")
    try:
        address = server.wait(lambda: _listening(server.log), START_S)
        server = Server(process=process, log_file=log_file, url=f"http://{address}")
        server.wait(lambda: answers(server, "/-/ready"), START_S)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listening(log: str) -> str:
    """Return the address that a log says it listens on, empty before."""
    for line in log.splitlines():
        if '"Listening on"' in line and line.endswith("}"):
            return str(json.loads(line)["address"])
    return ""


def _address(url: str) -> str:
    return url.removeprefix("http://").rstrip("/")
