"""Every question of every dashboard, asked of a real Prometheus over a real server under load.

Owns one server that runs out of KV blocks, refuses, and loses a client, and one Prometheus over it.
Expressions must have data, and SQL must have rows, except those that tests/data/without_data.toml
lists with the reason each; what it lists must truly have none.
"""

import csv
import io
import math
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry.named import catalogue
from tests import tiny
from tests.api import ids, in_flight, raw_request
from tests.prometheus import Prometheus, prometheus
from tests.servers import Server, serving
from tests.test_dashboards import FILES, expressions, panels, read, substituted

WITHOUT = Path(__file__).resolve().parent / "data" / "without_data.toml"
WINDOW = "30s"
GROWS = (
    "iterscope_preemptions_total",
    "iterscope_requests_rejected_total",
    'iterscope_requests_cancelled_total{cause="client"}',
    "iterscope_prefix_cache_hits_total",
    "iterscope_tenant_device_seconds_total",
)
"""What has happened before anything is asked."""


@dataclass(frozen=True)
class Places:
    """The server, the Prometheus over it, and the instant, unix s, at which the load ended."""

    server: Server
    asked: Prometheus
    at: float

    def has_data(self, expr: str) -> bool:
        """Tell whether an expression had a value when the load ended, however late it is asked."""
        return any(not math.isnan(one.value) for one in self.asked.query(expr, time=self.at))


@pytest.fixture(scope="module")
def without() -> dict[str, str]:
    listed = tomllib.loads(WITHOUT.read_text(encoding="utf-8"))["without"]
    assert all(len(one["reason"]) > 15 for one in listed)
    return {one["asked"]: one["reason"] for one in listed}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("dashboards")
    model = tiny.write(folder / "tiny")
    flags = (
        f"--history={folder / 'history'}",
        "--max-num-seqs=6",
        "--kv-blocks=24",
        "--max-queue-requests=4",
        "--max-num-batched-tokens=128",
    )
    with (
        serving(folder, model, *flags, parrot=True, beat_ms=4) as server,
        prometheus(folder, [server.url]) as asked,
    ):
        asked.wait_scraped("iterscope_requests")
        with under_load(server):
            asked.wait(lambda: all(grown(asked, counter) for counter in GROWS), 60)
            asked.wait_scrapes(8)
            places = Places(server, asked, time.time())
        yield places


def grown(asked: Prometheus, counter: str) -> bool:
    """Tell whether a counter has grown from one scrape to a later one."""
    return any(sample.value > 0 for sample in asked.query(f"increase({counter}[{WINDOW}])"))


class under_load:  # noqa: N801
    """Sends prompts with a common beginning from two tenants, more than fit, until it is left."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(12)]

    def __enter__(self) -> None:
        gone = raw_request(self.server, {"prompt": ids(8), "max_tokens": 300, "stream": True})
        self.server.wait(lambda: in_flight(self.server))
        gone.close()
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)

    def ask(self, number: int) -> None:
        body = {"prompt": ids(40 + number), "max_tokens": 60, "ignore_eos": True}
        headers = {"X-Tenant": ("acme", "free")[number % 2]}
        with httpx.Client(timeout=30, verify=False) as client:
            while not self.stop.is_set():
                url = f"{self.server.url}/v1/completions"
                if client.post(url, json=body, headers=headers).status_code != 200:
                    self.stop.wait(0.05)


@pytest.mark.parametrize("name", FILES)
def test_every_expression_returns_data(name: str, places: Places, without: dict[str, str]) -> None:
    every = {plain(expr): substituted(expr, WINDOW) for expr in expressions(read(name))}
    empty = {expr for expr, sent in every.items() if not places.has_data(sent)}
    listed = {expr for expr in every if expr in without}
    assert empty - listed == set(), "without data, and not in tests/data/without_data.toml"
    assert listed - empty == set(), "listed as without data, and has some"


def plain(expr: str) -> str:
    """Return an expression as a person would write it: without the dashboard's choices."""
    for part in ('model_name=~"$model",', 'engine=~"$engine",', 'instance=~"$instance"'):
        expr = expr.replace(part, "")
    return expr.replace(",}", "}").replace("{}", "")


def test_what_is_listed_as_without_data_is_asked(without: dict[str, str]) -> None:
    every = {plain(expr) for name in FILES for expr in expressions(read(name))}
    every |= {target["url"] for target in questions()}
    assert set(without) <= every


def test_every_variable_offers_what_there_is(places: Places) -> None:
    asked = places.asked
    for label in ("model_name", "engine", "instance"):
        values = asked.api(f"label/{label}/values", **{"match[]": "iterscope_requests"})
        assert len(values) == 1, label


def questions() -> Iterator[dict[str, Any]]:
    for panel in panels(read("post-mortem.json")):
        yield from panel["targets"]


@pytest.mark.parametrize("target", list(questions()), ids=lambda target: target["url"])
def test_sql_answers_as_the_panel_expects(
    target: dict[str, Any], places: Places, without: dict[str, str]
) -> None:
    """GIVEN the POST that Infinity makes, THEN its CSV has the columns, and rows."""
    server = places.server
    options = target["url_options"]
    [free] = [
        one["current"]["value"]
        for one in read("post-mortem.json")["templating"]["list"]
        if one["name"] == "sql"
    ]
    quoted = '"' + free.replace('"', '\\"') + '"'
    body = options["data"].replace("${__from}", "1000000000000").replace("${__to}", "4000000000000")
    response = httpx.post(
        server.url + target["url"],
        content=body.replace("${sql:doublequote}", quoted),
        headers={one["key"]: one["value"] for one in options["headers"]}
        | {"Content-Type": options["body_content_type"]},
        timeout=30,
        verify=False,
    )
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/csv")
    head, *rows = list(csv.reader(io.StringIO(response.text)))
    wanted = {column["selector"]: column["type"] for column in target["columns"]}
    assert set(wanted) <= set(head)
    query = catalogue().get(target["url"].rpartition("/")[2])
    if query is None or query.kind != "lint":  # those have rows when something is wrong
        assert bool(rows) != (target["url"] in without), target["url"]
    for name, kind in wanted.items():
        place = head.index(name)
        if kind == "number":
            assert all(float(row[place]) is not None for row in rows if row[place]), name


# ---- dashboards of others


def vllm_example() -> Iterator[str]:
    """Yield what vLLM's public example dashboard for Grafana asks (examples/online_serving/
    prometheus_grafana), by its names and shapes: people have it, and point it at us."""
    only = '{model_name=~".+"}'
    for name in ("e2e_request_latency", "time_per_output_token", "time_to_first_token"):
        metric = f"vllm:{name}_seconds"
        for share in (0.99, 0.95, 0.9, 0.5):
            cells = f"sum by(le) (rate({metric}_bucket{only}[{WINDOW}]))"
            yield f"histogram_quantile({share}, {cells})"
        yield f"rate({metric}_sum{only}[{WINDOW}]) / rate({metric}_count{only}[{WINDOW}])"
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        yield f"rate(vllm:{name}{only}[{WINDOW}])"
    for name in ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"):
        yield f"vllm:{name}{only}"
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        yield f"sum by(le) (increase(vllm:{name}_bucket{only}[{WINDOW}]))"
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{only}[{WINDOW}]))"
    for phase in ("queue", "prefill", "decode"):
        yield f"rate(vllm:request_{phase}_time_seconds_sum{only}[{WINDOW}])"
    yield f"rate(vllm:request_max_num_generation_tokens_sum{only}[{WINDOW}])"


def test_vllms_example_dashboard_works(places: Places) -> None:
    every = list(vllm_example())
    assert len(every) == 27
    assert [expr for expr in every if not places.has_data(expr)] == []
    models = places.asked.api("label/model_name/values", **{"match[]": '{__name__=~"vllm:.*"}'})
    assert len(models) == 1
