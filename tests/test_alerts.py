"""Alerts: each fires on its fault and clears, is silent otherwise, and has a page that helps."""

import argparse
import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.models import alerting

from grafana import alert_files
from grafana.alert_spec import Alert
from grafana.alerts import ALERTS
from grafana.recordings import BY_NAME
from server.cli import build_parser
from telemetry.metric_table import METRICS
from telemetry.named import catalogue
from tests import alert_play
from tests.alert_cases import HEALTHY, IDLE
from tests.alert_faults import FAULTS
from tests.alert_play import Phase

ROOT = Path(__file__).resolve().parent.parent
RECORDING = ROOT / "grafana/rules/recording.yml"
ALERTING = ROOT / "grafana/rules/alerting.yml"
PROVISIONED = ROOT / "grafana/provisioning/alerting/alerts.yaml"
ALERTMANAGER = ROOT / "grafana/alertmanager.yml"
PROMETHEUS_OWN = {"up"}
TOOL_S = 120.0


def tool(*command: str) -> str:
    """Run a program and return what it says; fails with that if it is not content."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said


def play(folder: Path, tests: list[dict[str, Any]], *rules: Path) -> None:
    """Play series to rules; all that they call for must be what is expected.

    promtool takes groups in no order unless told, and an alert would see the figures before.
    """
    groups = [g["name"] for file in rules for g in yaml.safe_load(file.read_text())["groups"]]
    for every in {test["interval"] for test in tests}:
        script = {
            "rule_files": [str(path) for path in rules],
            "evaluation_interval": every,
            "group_eval_order": groups,
            "tests": [test for test in tests if test["interval"] == every],
        }
        file = folder / f"tests-{every}.yml"
        file.write_text(json.dumps(script), encoding="utf-8")  # JSON is YAML
        tool("promtool", "test", "rules", str(file))


def provisioned() -> list[dict[str, Any]]:
    groups = yaml.safe_load(PROVISIONED.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def as_prometheus(rule: dict[str, Any]) -> dict[str, Any]:
    """Return Grafana's alert as a rule of Prometheus."""
    figure, limit = (part["model"] for part in rule["data"])
    (above,) = limit["conditions"][0]["evaluator"]["params"]
    words = json.dumps(rule["annotations"]).replace("$values.A.Value", "$value")
    return {
        "alert": rule["title"].split()[0],
        "expr": f"({figure['expr']}) > {above}",
        "annotations": json.loads(words),
    } | {key: rule[key] for key in ("for", "labels")}


# ---- what fires, and what does not


def test_each_alert_fires_on_its_fault_alone_and_clears(tmp_path: Path) -> None:
    play(tmp_path, [alert_play.fires(fault) for fault in FAULTS], RECORDING, ALERTING)


def test_near_misses_call_nobody(tmp_path: Path) -> None:
    play(tmp_path, list(alert_play.near_misses(FAULTS)), RECORDING, ALERTING)


def test_nobody_is_called_in_a_healthy_life(tmp_path: Path) -> None:
    """Idle, busy, started again, started for the first time, of an older version: all is well."""
    busy = Phase(minutes=30, values=HEALTHY)
    again = HEALTHY | {"iterscope_start_time_seconds": 1_790_009_000.0}
    old = {"up": 1.0, 'iterscope_requests{state="waiting"}': 40.0, "iterscope_kv_usage_ratio": 1.0}
    # More work than before, and a cache that is full of it, but nobody waits long.
    full = HEALTHY | {
        "iterscope_requests_accepted_total": 1_200.0,
        'iterscope_requests_ended_total{finish="stop"}': 1_000.0,
        "iterscope_kv_usage_ratio": 1.0,
        'iterscope_requests{state="running"}': 64.0,
    }
    lives = [
        alert_play.quiet(
            "idle, then busy, then idle",
            Phase(minutes=20, values=IDLE),
            busy,
            Phase(minutes=30, values=IDLE),
        ),
        alert_play.quiet("new", Phase(minutes=4, values=dict.fromkeys(HEALTHY)), busy),
        alert_play.quiet("started again", busy, Phase(minutes=30, values=again, anew=True)),
        alert_play.quiet("an older server", Phase(minutes=60, values=old)),
        alert_play.quiet("full", busy, Phase(minutes=40, values=full), busy),
    ]
    play(tmp_path, lives, RECORDING, ALERTING)


def test_faults_and_near_misses_leave_no_alert_out() -> None:
    known = {(alert.name, dict(alert.labels).get("window")) for alert in ALERTS}
    assert {(fault.alert, fault.labels.get("window")) for fault in FAULTS} == known
    assert {(f.alert, f.labels.get("window")) for f in FAULTS if f.near} == known


def test_grafana_judges_alike(tmp_path: Path) -> None:
    """Its alerts, as rules of Prometheus without any recording, fire on the same faults alone."""
    rules = [as_prometheus(rule) for rule in provisioned()]
    file = tmp_path / "as-grafana.yml"
    file.write_text(json.dumps({"groups": [{"name": "grafana", "rules": rules}]}), encoding="utf-8")
    play(tmp_path, [alert_play.fires(fault) for fault in FAULTS if fault.every == 1], file)


# ---- what is written


def test_what_is_committed_is_what_is_generated() -> None:
    for path, text in alert_files.files().items():
        committed = (ROOT / path).read_text(encoding="utf-8")
        assert committed == text, f"{path} is stale: run python -m grafana.alert_files"


def test_tools_accept_rules_and_configuration() -> None:
    said = tool("promtool", "check", "rules", "--lint-fatal", str(RECORDING), str(ALERTING))
    assert f"SUCCESS: {len(BY_NAME)} rules found" in said
    assert f"SUCCESS: {len(ALERTS)} rules found" in said
    assert "SUCCESS" in tool("amtool", "check-config", str(ALERTMANAGER))


def test_expressions_name_metrics_that_exist() -> None:
    """In each expression, parsed: a metric of ours with labels that it has, or a recording."""
    table = {spec.name: set(spec.labels) for spec in METRICS}
    expressions = [alert_files.expression(alert) for alert in ALERTS]
    for expression in [*expressions, *(one.expr for one in BY_NAME.values())]:
        for name, labels in selectors(promql_parser.parse(expression)):
            if name in BY_NAME:
                assert not labels, expression
            elif name not in PROMETHEUS_OWN:
                assert name in table, f"{name} in {expression}"
                assert labels <= table[name], f"{labels} of {name} in {expression}"
    assert set(BY_NAME) <= {n for e in expressions for n, _ in selectors(promql_parser.parse(e))}


def selectors(tree: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the metric and the labels of each selector below a parsed expression."""
    if isinstance(tree, promql_parser.VectorSelector):
        yield tree.name, {matcher.name for matcher in tree.matchers.matchers}
    parts = [getattr(tree, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for part in [*parts, *(getattr(tree, "args", None) or [])]:
        if part is not None and not isinstance(part, str):
            yield from selectors(part)


def test_grafana_has_the_alerts_in_its_own_form() -> None:
    rules = provisioned()
    assert len(rules) == len(ALERTS)
    assert (
        len({rule["uid"] for rule in rules}) == len({rule["title"] for rule in rules}) == len(rules)
    )
    for rule, alert in zip(rules, ALERTS, strict=True):
        assert len(rule["uid"]) <= 40  # Grafana's own limit
        known = alerting.Rule.from_json(rule | {"folderUID": "", "ruleGroup": "", "orgID": 1})
        assert set(rule) <= set(known.to_json()), "a field that Grafana's type has not"
        figure, limit = (alerting.Query.from_json(part) for part in rule["data"])
        assert (figure.ref_id, limit.ref_id) == ("A", rule["condition"])
        assert rule["data"][1]["model"]["conditions"][0]["evaluator"]["params"] == [alert.above]
        promql_parser.parse(rule["data"][0]["model"]["expr"])
        assert "iterscope:" not in rule["data"][0]["model"]["expr"]


# ---- the pages


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: "-".join((alert.name, *kind(alert))))
def test_a_runbook_helps(alert: Alert) -> None:
    page = (ROOT / f"docs/runbooks/{alert.name}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    assert heads == [alert.name, "Meaning", "First look", "Likely fixes"]
    first_look, _, fixes = page.partition("## First look")[2].partition("## Likely fixes")
    assert re.search(rf"iterscope sql .*--query {alert.query}\b", first_look)
    queries = catalogue()
    for name, given in re.findall(r"--query (\w+)((?: -p \w+=\w*)*)", page):
        own = {parameter.name for parameter in queries[name].parameters}
        assert set(re.findall(r"-p (\w+)=", given)) <= own, name
    assert set(flags(fixes)) & every_flag("serve"), "no setting that would help"
    commands = re.findall(r"iterscope (\w+)([^`\n]*)", page)
    for command, rest in commands:
        assert set(flags(rest)) <= every_flag(command), f"iterscope {command}{rest}"
    asked = {flag for _, rest in commands for flag in flags(rest)}
    assert set(flags(page)) - asked - {"--ppid"} <= every_flag("serve")  # ps has --ppid


def kind(alert: Alert) -> list[str]:
    return [value for _, value in alert.labels]


def flags(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)


@functools.cache
def every_flag(command: str) -> set[str]:
    """Return every flag of a command."""
    parser = build_parser(command)
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found: set[str] = set()
    waiting: list[argparse.ArgumentParser] = [commands.choices[command]]
    while waiting:
        for action in waiting.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                waiting.extend(action.choices.values())
    return found


def test_no_runbook_is_left_without_its_alert() -> None:
    pages = {path.stem for path in (ROOT / "docs/runbooks").iterdir()}
    assert pages == {alert.name for alert in ALERTS}
