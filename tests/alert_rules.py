"""The rules that ship, for a Prometheus that has seconds and not days to look.

Owns the files that tests give to a real Prometheus: every recording and every alert, evaluated as
often as a test scrapes. What else a test changes (a limit, a window) it says itself.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from grafana import alert_files
from grafana.alert_spec import Alert
from grafana.alerts import GROUPS
from tests.prometheus import EVERY_S


def write(folder: Path, changed: Callable[[Alert], Alert], *, window: str = "5m") -> list[Path]:
    """Write every rule, each alert as `changed` returns it; windows of 5 minutes are `window`."""
    groups = [replace(group, alerts=tuple(map(changed, group.alerts))) for group in GROUPS]
    written = []
    for name, data in (
        ("recording", alert_files.recording_rules()),
        ("alerting", alert_files.prometheus_rules(groups)),
    ):
        for group in data["groups"]:
            group["interval"] = f"{round(EVERY_S * 1000)}ms"
            for rule in group["rules"]:
                rule["expr"] = rule["expr"].replace("[5m]", f"[{window}]")
        file = folder / f"{name}.yml"
        file.write_text(json.dumps(data), encoding="utf-8")  # JSON is YAML
        written.append(file)
    return written
