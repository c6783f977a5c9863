"""A dashboard: rows of panels laid out, and the variables, links and marks that all boards share.

Owns the grid, the ids and what makes a file importable by hand; generate.py writes what `json_of`
returns. Variables: the Prometheus to ask, model, engine, instance, and where the live page is. Must
never place two panels over each other or leave a hole in a row.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from grafana.looks import panel_of, source_ref
from grafana.panel import Panel, expression

GRID = 24
NAMES = MappingProxyType(
    {
        "barchart": "Bar chart",
        "heatmap": "Heatmap",
        "stat": "Stat",
        "table": "Table",
        "timeseries": "Time series",
    }
)
GRAFANA = "11.6.0"
TAG = "iterscope"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels side by side, under a title; their widths fill whole lines of the grid."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard. `over`: how much time it shows at first."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    over: str = "now-30m"


def json_of(board: Board) -> str:
    """Return a board over Prometheus as the JSON that Grafana loads."""
    made = begun(uid=board.uid, title=board.title, about=board.about, over=board.over)
    for variable in variables():
        made.with_variable(variable)
    for annotation in annotations():
        made.annotation(annotation)
    built = made.build()
    lines = [
        (row.title, [panel_of(panel, row.height) for panel in row.panels]) for row in board.rows
    ]
    built.panels = list(laid_out(lines))
    return encoded(built, {"DS_PROMETHEUS": ("prometheus", "Prometheus")})


def begun(*, uid: str, title: str, about: str, over: str) -> build.Dashboard:
    """Return the part of a dashboard that all of ours share."""
    made = build.Dashboard(f"Iterscope / {title}").uid(uid).description(about).tags([TAG])
    made.timezone("browser").time(over, "now").refresh("10s").editable()
    made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    made.link(
        build.DashboardLink("Live page")
        .type(model.DashboardLinkType.LINK)
        .url("${live}/dashboard/#/live")
        .icon("external link")
        .tooltip("Iterscope's own page: every request, every iteration")
        .target_blank(True)
    )
    return made.link(
        build.DashboardLink("Iterscope")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def laid_out(
    rows: Sequence[tuple[str, list[model.Panel]]],
) -> Iterator[model.Panel | model.RowPanel]:
    """Yield rows and panels with their ids and places; every line of the grid is filled."""
    number, top = 0, 0
    for title, panels in rows:
        number += 1
        place = model.GridPos(h=1, w=GRID, x=0, y=top)
        yield model.RowPanel(title=title, grid_pos=place, id_val=number, collapsed=False)
        left, top = 0, top + 1
        for panel in panels:
            number += 1
            size = panel.grid_pos
            assert size is not None
            assert left + size.w <= GRID, f"{title}: {panel.title} does not fit"
            panel.id_val = number
            panel.grid_pos = model.GridPos(h=size.h, w=size.w, x=left, y=top)
            yield panel
            left += size.w
            if left == GRID:
                left, top = 0, top + size.h
        assert left == 0, f"{title} does not fill its last line"


def variables() -> Iterator[Any]:
    """Yield the variables of dashboards over Prometheus."""
    # An import by hand puts the chosen source's uid in here; elsewhere the first of its kind is it.
    chosen = model.VariableOption(text="${DS_PROMETHEUS}", value="${DS_PROMETHEUS}", selected=True)
    source = build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    yield source.current(chosen)
    chain = ""
    for name, label in (("model", "model_name"), ("engine", "engine"), ("instance", "instance")):
        asked = f"label_values(iterscope_requests{{{chain}}}, {label})".replace("{}", "")
        yield (
            build.QueryVariable(name)
            .label(name.capitalize())
            .datasource(source_ref())
            .query({"query": asked, "refId": f"{name}Variable"})
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(model.VariableOption(text=["All"], value=["$__all"], selected=True))
        )
        chain += f'{"," if chain else ""}{label}=~"${name}"'
    yield live_page()


def live_page() -> build.TextBoxVariable:
    """Return the variable that says where Iterscope's own page is."""
    address = "http://localhost:8000"
    return (
        build.TextBoxVariable("live")
        .label("Live page at")
        .default_value(address)
        .current(model.VariableOption(text=address, value=address, selected=True))
    )


def annotations() -> Iterator[build.AnnotationQuery]:
    """Yield what is marked in every panel: alerts that fire, engines that started, preemptions."""
    starts = "changes(iterscope_engine_starts_total{$only}[1m]) > 0"
    thrown = "sum by (cause) (increase(iterscope_preemptions_total{$only}[1m])) > 0"
    for name, colour, enabled, expr in (
        ("Alerts", "red", True, 'ALERTS{alertname=~"Iterscope.*",alertstate="firing"}'),
        ("Engine starts", "blue", True, _titled("engine started", "engine", starts)),
        ("Preemptions", "orange", False, _titled("preempted for $1", "cause", thrown)),
    ):
        query = build.AnnotationQuery().name(name).datasource(source_ref())
        yield query.enable(enabled).icon_color(colour).expr(expression(expr))


def _titled(title: str, label: str, expr: str) -> str:
    """Return an expression whose series are named as alerts are: by that Grafana titles a mark."""
    return f'label_replace({expr}, "alertname", "{title}", "{label}", "(.*)")'


def encoded(built: model.Dashboard, inputs: dict[str, tuple[str, str]]) -> str:
    """Return a dashboard as JSON, with what an import by hand asks for: sources by their kind."""
    body = json.loads(JSONEncoder().encode(built))
    kinds = sorted({panel["type"] for panel in body["panels"]} - {"row"})
    head = {
        "__inputs": [
            {
                "name": name,
                "label": label,
                "type": "datasource",
                "pluginId": kind,
                "pluginName": label,
                "description": "",
            }
            for name, (kind, label) in inputs.items()
        ],
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": GRAFANA},
            *(
                {"type": "datasource", "id": kind, "name": label, "version": "1.0.0"}
                for kind, label in inputs.values()
            ),
            *({"type": "panel", "id": kind, "name": NAMES[kind], "version": ""} for kind in kinds),
        ],
    }
    return json.dumps(head | body, indent=1, ensure_ascii=False) + "\n"
