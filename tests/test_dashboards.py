"""Grafana's dashboards as files: current, whole, importable, and of the SDK's own types.

Owns what can be known of them without a Grafana: there is none here, so none of them was opened in
one. test_dashboards_live.py asks their questions of a real server.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.board import NAMES
from grafana.generate import FOLDER, dashboards
from grafana.panel import METRIC, Panel, Query, metrics_of
from grafana.post_mortem import ROWS
from telemetry.named import catalogue

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path.name for path in FOLDER.glob("*.json"))
BUILT_IN = {"__all", "__from", "__to", "__rate_interval", "__range", "__interval"}
USE = re.compile(r"\$\{?(\w+)")


def read(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return body


def panels(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in body["panels"] if panel["type"] != "row")


def test_what_is_committed_is_what_is_generated() -> None:
    made = dashboards()
    assert sorted(made) == FILES
    for name, content in made.items():
        current = (FOLDER / name).read_text(encoding="utf-8")
        assert current == content, f"{name}: run `python -m grafana.generate`"


def test_there_is_one_for_each_subject() -> None:
    subjects = ("health", "kv", "latency", "overview", "post-mortem", "scheduler", "tenants")
    assert [f"{subject}.json" for subject in subjects] == FILES
    uids = [read(name)["uid"] for name in FILES]
    assert len(set(uids)) == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_sdk_reads_it_and_writes_the_same(name: str) -> None:
    """GIVEN the SDK's types of Grafana 11.6, THEN a round trip through them loses nothing."""
    register_default_plugins()
    body = read(name)
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(body)))
    ours = {key: value for key, value in body.items() if not key.startswith("__")}
    assert again == ours


@pytest.mark.parametrize("name", FILES)
def test_panels_have_their_own_ids_and_places(name: str) -> None:
    body = read(name)
    ids = [panel["id"] for panel in body["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in body["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} overlaps"
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
    bottom = max(y for _, y in taken) + 1
    assert len(taken) == 24 * bottom, "no holes"


@pytest.mark.parametrize("name", FILES)
def test_every_variable_that_is_used_exists(name: str) -> None:
    body = read(name)
    made = {variable["name"] for variable in body["templating"]["list"]}
    asked = {key["name"] for key in body["__inputs"]}
    text = json.dumps({key: value for key, value in body.items() if key != "__inputs"})
    used = set(USE.findall(text)) - {"1"}  # of label_replace
    assert used <= made | BUILT_IN | asked, used - made
    assert made <= used | {"sql"}, "a variable that nothing uses"
    if "Prometheus" in text:
        assert {"datasource", "model", "engine", "instance"} <= made


@pytest.mark.parametrize("name", FILES)
def test_an_import_by_hand_asks_for_its_sources(name: str) -> None:
    body = read(name)
    kinds = {one["id"] for one in body["__requires"] if one["type"] == "panel"}
    assert kinds == {panel["type"] for panel in panels(body)} <= set(NAMES)
    for key in body["__inputs"]:
        [variable] = [
            one
            for one in body["templating"]["list"]
            if one["current"]["value"] == f"${{{key['name']}}}"
        ]
        assert (variable["type"], variable["query"]) == ("datasource", key["pluginId"])
        sources = {panel["datasource"]["uid"] for panel in panels(body)}
        assert sources == {f"${{{variable['name']}}}"}, "only what was chosen is asked"
    assert body.get("id") is None, "an id of another Grafana would overwrite a board there"


@pytest.mark.parametrize("name", FILES)
def test_a_panel_says_what_it_asks_in_which_unit_and_what_it_means(name: str) -> None:
    body = read(name)
    titles = [panel["title"] for panel in panels(body)]
    assert len(set(titles)) == len(titles)
    for panel in panels(body):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["targets"], panel["title"]
        if panel["type"] != "table":
            where = panel["options"]["yAxis"] if panel["type"] == "heatmap" else None
            assert (where or panel["fieldConfig"]["defaults"])["unit"], panel["title"]
        for runbook in re.findall(r"docs/runbooks/(\w+)\.md", panel["description"]):
            assert (ROOT / "docs" / "runbooks" / f"{runbook}.md").exists(), runbook
        for link in panel.get("links", []):
            asked = re.search(r"&q=(\w+)&", link["url"])
            assert asked is not None
            assert asked[1] in catalogue()


def test_every_expression_parses() -> None:
    count = 0
    for name in FILES:
        for expr in expressions(read(name)):
            promql_parser.parse(substituted(expr))
            count += 1
    assert count > 100
    with pytest.raises(ValueError, match=r"syntax|unclosed|unexpected"):
        promql_parser.parse("sum(rate(x[5m])")


def test_only_metrics_that_are_ours_are_read() -> None:
    """GIVEN vLLM's names switched off, THEN no panel misses one; a panel cannot invent a name."""
    read_names = {
        found
        for name in FILES
        for expr in expressions(read(name))
        for found in METRIC.findall(expr)
    }
    assert len(read_names) > 60
    assert not [name for name in read_names if name.startswith("vllm:")]
    for invented in ("iterscope_invented_total", "iterscope_requests_bucket"):
        with pytest.raises(KeyError):
            metrics_of(Panel(title="x", queries=(Query(expr=f"{invented}{{$only}}"),)))


def test_named_queries_of_the_post_mortem_exist() -> None:
    asked = [question.name for _, questions in ROWS for question in questions]
    assert len(set(asked)) == len(asked)
    assert set(asked) <= set(catalogue())


def test_provisioning_agrees_with_itself() -> None:
    """GIVEN the compose file, THEN what it mounts is there, and sources have their uids."""
    folder = ROOT / "grafana"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for service in compose["services"].values():
        for mount in service["volumes"]:
            place = mount.split(":")[0]
            assert not place.startswith(".") or (folder / place).exists(), place
        assert re.search(r":v?\d+\.\d+", service["image"]), "a pinned image"
    sources = yaml.safe_load((folder / "provisioning/datasources/iterscope.yaml").read_text())
    kinds = {one["uid"]: one["type"] for one in sources["datasources"]}
    assert set(kinds) == {"iterscope-prometheus", "iterscope-sql"}
    wanted = {key["pluginId"] for name in FILES for key in read(name)["__inputs"]}
    assert wanted == set(kinds.values())
    prometheus = yaml.safe_load((folder / "prometheus.yml").read_text())
    [job] = prometheus["scrape_configs"]
    assert job["job_name"] == "iterscope", "two panels and some alerts ask for that job"
    assert {Path(rule).parent.name for rule in prometheus["rule_files"]} == {"rules"}


def expressions(body: dict[str, Any]) -> Iterator[str]:
    """Yield every expression of a dashboard, its annotations' too."""
    for panel in panels(body):
        yield from (target["expr"] for target in panel["targets"] if "expr" in target)
    yield from (one["expr"] for one in body["annotations"].get("list", []) if one.get("expr"))


def substituted(expr: str, window: str = "30s") -> str:
    """Return an expression as Grafana would send it with every variable at All."""
    for name in ("model", "engine", "instance"):
        expr = expr.replace(f"${name}", ".*")
    for name in ("$__rate_interval", "$__range", "$__interval"):
        expr = expr.replace(name, window)
    assert "$" not in expr.replace("for $1", ""), expr
    return expr
