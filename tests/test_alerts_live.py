"""The rules over a real server: a real Prometheus judges it, and a fault reaches a webhook.

Owns one server under load with a Prometheus that has every rule, evaluated four times a second, and
an Alertmanager with a webhook. The limit of one alert is lowered for the test, so that a stopped
engine is told of within seconds; its expression, its words and its way are those that ship.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from grafana.alert_spec import Alert
from grafana.alerts import ALERTS
from grafana.recordings import RECORDINGS
from tests import alert_rules, kv_squeeze, tiny
from tests.api import ids, post
from tests.prometheus import Prometheus, Webhook, alertmanager, prometheus, webhook
from tests.servers import Server, engine_pid, serving

STALLED = "IterscopeEngineStalled"
STALLED_S = 1.5
WITHOUT = {
    'absent(up{job="iterscope"})': "a server is scraped",
    "iterscope:graph_misses:ratio5m": "this engine has no graphs: neither hits nor misses",
    "increase((iterscope_engine_starts_total - 1)[30m:15s])": "it looks each 15 s: two take 30 s",
}
"""What has no element in this test, with the reason each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A server, who judges it, and who is told."""

    server: Server
    prometheus: Prometheus
    webhook: Webhook


def _impatient(alert: Alert) -> Alert:
    return replace(alert, above=STALLED_S) if alert.name == STALLED else alert


@contextmanager
def under_load(server: Server) -> Iterator[None]:
    """Ask for completions from six clients at once, again and again, until the block ends."""
    stop = threading.Event()

    def ask(client: int) -> None:
        while not stop.is_set():
            body = {"prompt": ids(20 + client), "max_tokens": 30, "ignore_eos": True}
            assert post(server, "/v1/completions", body).status_code == 200

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("alerts")
    model = tiny.write(folder / "tiny")
    # Objectives that no machine misses, however busy: what is judged here is the way, not the time.
    flags = (f"--history={folder / 'history'}", "--ttft-ms=60000", "--tpot-ms=60000")
    rules = alert_rules.write(folder, _impatient)
    with (
        serving(folder, model, *flags) as server,
        webhook() as told,
        alertmanager(folder, told.url) as manager,
        prometheus(folder, [server.url], rules=rules, alertmanager=manager.url) as judge,
        under_load(server),
    ):
        judge.wait_scraped("iterscope_requests")
        judge.wait_scrapes(6)
        yield Watched(server=server, prometheus=judge, webhook=told)


def test_every_rule_is_evaluated_and_its_figures_have_data(watched: Watched) -> None:
    groups = watched.prometheus.api("rules")["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(ALERTS) + len(RECORDINGS)
    assert all(rule["health"] == "ok" and "lastError" not in rule for rule in evaluated), evaluated
    figures = {alert.value for alert in ALERTS} | {one.name for one in RECORDINGS}
    figures |= {guard for alert in ALERTS for guard in alert.where}
    # A guard is a comparison: what it compares must be there, whether or not it holds.
    figures = {figure.rsplit(" >", maxsplit=1)[0] for figure in figures}
    watched.prometheus.wait(lambda: not _empty(watched, figures - WITHOUT.keys()))
    assert WITHOUT.keys() <= figures


def _empty(watched: Watched, figures: set[str]) -> list[str]:
    return [figure for figure in figures if not watched.prometheus.query(figure)]


def test_nobody_is_paged_by_load(watched: Watched) -> None:
    firing = watched.prometheus.query('ALERTS{severity="page",alertstate="firing"}')
    # The one whose limit is lowered may see a machine that stands still for a moment.
    assert {one.labels["alertname"] for one in firing} <= {STALLED}
    assert watched.prometheus.value("sum(iterscope_requests_accepted_total)") > 0


def test_a_stopped_engine_reaches_the_webhook_and_is_told_to_be_well(watched: Watched) -> None:
    engine = engine_pid(watched.server)
    os.kill(engine, signal.SIGSTOP)  # with requests in flight: the load goes on
    try:
        fired = watched.server.wait(_told(watched, "firing"))
    finally:
        os.kill(engine, signal.SIGCONT)
    assert fired["labels"] == {
        "alertname": STALLED,
        "severity": "page",
        "job": "iterscope",
        "instance": watched.server.url.removeprefix("http://"),
        "model_name": "tiny",
        "engine": "0",
    }
    says = fired["annotations"]
    assert says["summary"].startswith(
        f"The engine of {fired['labels']['instance']} has work and has"
    )
    assert says["first_look"].startswith(
        f"iterscope sql --url {watched.server.url} --query slowest"
    )
    assert says["runbook_url"].endswith(f"/{STALLED}.md")
    watched.server.wait(_told(watched, "resolved", fired["startsAt"]))
    watched.prometheus.wait(lambda: not watched.prometheus.firing(STALLED))


def _told(watched: Watched, status: str, since: str = "") -> Callable[[], dict[str, Any] | None]:
    """Return what looks for a stall (that began then) among alerts that came with a status."""

    def look() -> dict[str, Any] | None:
        found = watched.webhook.alerts(status)
        stalls = [one for one in found if one["labels"]["alertname"] == STALLED]
        return next((one for one in stalls if since in ("", one["startsAt"])), None)

    return look


@pytest.mark.soak
def test_a_squeezed_kv_cache_is_told_of(tmp_path: Path) -> None:
    """Two minutes: what a real server tells under pressure is what the alerts look for."""
    picture = tmp_path / "squeeze.png"
    assert set(kv_squeeze.EXPECTED) <= kv_squeeze.squeeze(tmp_path, picture)
    assert picture.stat().st_size > 10_000
