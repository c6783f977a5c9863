"""The dashboard over SQL: the named queries of the time shown, from the record itself.

Owns which questions it asks and how each answer is drawn; generate.py writes it. It needs the
Infinity datasource and no Prometheus. Must never ask for what the live page draws better: lanes,
waterfalls and single requests are one click away there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import barchart, common, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model

from grafana import infinity
from grafana.board import begun, encoded, laid_out, live_page
from grafana.looks import record_link
from telemetry.named import NamedQuery, catalogue

UID, TITLE = "iterscope-post-mortem", "Post-mortem in SQL"
ABOUT = (
    "What the record itself says of the time shown: why requests waited, where their time went, who"
    " was in the way. Answers come from the history through the Infinity datasource."
)
FREE = "SELECT finish, count(*) AS requests FROM request_end GROUP BY ALL ORDER BY requests DESC"
UNITS = {"ms": "ms", "s": "s", "tokens/s": "tokens/s", "blocks": "short"}

Drawn = Literal["table", "bars", "stacked"]
Builder = table.Panel | barchart.Panel | timeseries.Panel


@dataclass(frozen=True, slots=True)
class Question:
    """A named query as a panel: its name, its width of 24, and how it is drawn."""

    name: str
    width: int
    drawn: Drawn = "table"


ROWS: tuple[tuple[str, tuple[Question, ...]], ...] = (
    (
        "Was anything wrong? (rows only if so)",
        (
            Question("starvation", 6),
            Question("preemption_thrash", 6),
            Question("idle_kv_with_queue", 6),
            Question("telemetry_gaps", 6),
        ),
    ),
    (
        "Why did requests wait?",
        (
            Question("why_waiting", 8, "bars"),
            Question("queue", 16, "stacked"),
            Question("longest_waits", 24),
        ),
    ),
    (
        "Where did their time go?",
        (Question("causes", 8, "bars"), Question("slowest_requests", 16)),
    ),
    (
        "Who was in the way?",
        (
            Question("neighbour_stalls", 12),
            Question("who_held_the_kv", 12),
            Question("longest_gaps", 12),
            Question("preemptions", 12),
        ),
    ),
    (
        "What did the engine do?",
        (Question("step_time", 12, "stacked"), Question("slowest_steps", 12)),
    ),
    (
        "How did it end?",
        (
            Question("departures", 12),
            Question("rejections", 12),
            Question("tenants", 12),
            Question("faults", 12),
        ),
    ),
)


def json_of_post_mortem() -> str:
    """Return the dashboard as the JSON that Grafana loads."""
    made = begun(uid=UID, title=TITLE, about=ABOUT, over="now-15m").refresh("")
    for variable in _variables():
        made.with_variable(variable)
    built = made.build()
    rows = [(title, [_panel(question) for question in asked]) for title, asked in ROWS]
    rows.append(("Ask anything: the SELECT above", [_free_panel()]))
    built.panels = list(laid_out(rows))
    return encoded(built, {"DS_ITERSCOPE_SQL": (infinity.KIND, "Infinity")})


def _variables() -> Iterator[build.DatasourceVariable | build.TextBoxVariable]:
    name = "${DS_ITERSCOPE_SQL}"
    chosen = model.VariableOption(text=name, value=name, selected=True)
    source = build.DatasourceVariable("sql_source").label("Iterscope's SQL").type(infinity.KIND)
    yield source.current(chosen)
    yield live_page()
    text = model.VariableOption(text=FREE, value=FREE, selected=True)
    yield build.TextBoxVariable("sql").label("SELECT").default_value(FREE).current(text)


def _panel(question: Question) -> model.Panel:
    query = catalogue()[question.name]
    # Bars are a label and a value: the first two columns, as telemetry/named.py has it.
    target = infinity.named(query, 2 if question.drawn == "bars" else None)
    made = _drawn(question.drawn, query)
    made.title(query.title).description(query.meaning).span(question.width).height(8)
    made.datasource(_source()).with_target(target).links([record_link(query.name)])
    made.no_value("nothing" if query.kind == "lint" else "no rows")
    made.transformations(infinity.times_shown(list(target.columns)))
    return made.build()


def _drawn(drawn: Drawn, query: NamedQuery) -> Builder:
    unit = UNITS.get(query.unit, "short")
    if drawn == "table":
        # A table's columns have units of their own, in their names.
        return table.Panel().filterable(True)
    if drawn == "bars":
        made = (
            barchart.Panel()
            .unit(unit)
            .fill_opacity(80)
            .orientation(shapes.VizOrientation.HORIZONTAL)
        )
        made.legend(common.VizLegendOptions().show_legend(False))
        return made.show_value(shapes.VisibilityMode.ALWAYS)
    lines = timeseries.Panel().unit(unit).line_width(1).fill_opacity(60)
    legend = common.VizLegendOptions().show_legend(True)
    lines.legend(legend.placement(shapes.LegendPlacement.BOTTOM).calcs(["mean", "max"]))
    return lines.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))


def _free_panel() -> model.Panel:
    made = table.Panel().title("The answer").filterable(True)
    made.description("One SELECT over the record; tables and columns are in SCHEMA.md.")
    return made.span(24).height(10).datasource(_source()).with_target(infinity.free("sql")).build()


def _source() -> model.DataSourceRef:
    return model.DataSourceRef(type_val=infinity.KIND, uid=infinity.SOURCE)
