"""What panels look like: each kind of panel as Grafana's own types have it, through the SDK.

Owns the looks: legends, colours, limits, what is left out of tables. board.py asks for each panel;
post_mortem.py for those over SQL. Must never know what a panel is about: that is its data.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat_shapes
from grafana_foundation_sdk.models import prometheus as prometheus_shapes

from grafana.panel import Panel, described, expression, question_of

SOURCE = "${datasource}"
LINK = "${live}/dashboard/#/post-mortem?show=query&q=%s&from=${__from:date:iso}&to=${__to:date:iso}"


Builder = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


def panel_of(panel: Panel, height: int) -> model.Panel:
    """Return a panel over Prometheus as the SDK has it."""
    made = LOOKS[panel.kind](panel)
    made.title(panel.title).span(panel.width).height(height)
    made.datasource(source_ref()).description(described(panel))
    for target in targets(panel):
        made.with_target(target)
    if question := question_of(panel):
        made.links([record_link(question)])
    return made.build()


def source_ref() -> model.DataSourceRef:
    """Return the Prometheus that the dashboard's variable chooses."""
    return model.DataSourceRef(type_val="prometheus", uid=SOURCE)


def record_link(question: str) -> build.DashboardLink:
    """Return the link from a panel to the named query, for the time that the dashboard shows."""
    return (
        build.DashboardLink(f"Ask the record: {question}")
        .type(model.DashboardLinkType.LINK)
        .url(LINK % question)
        .target_blank(True)
    )


def targets(panel: Panel) -> Iterable[prometheus.Dataquery]:
    """Yield a panel's queries, named A, B, C."""
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().datasource(source_ref()).expr(expression(query.expr))
        target.ref_id(chr(ord("A") + index)).legend_format(query.legend or "__auto")
        target.editor_mode(prometheus_shapes.QueryEditorMode.CODE)
        if panel.kind == "heatmap":
            target.format(prometheus_shapes.PromQueryFormat.HEATMAP).range()
        elif panel.kind in {"number", "table"}:
            target.instant()
            if panel.kind == "table":
                target.format(prometheus_shapes.PromQueryFormat.TABLE)
        else:
            target.range().exemplar(query.exemplars)
        yield target


def thresholds(limits: Sequence[tuple[float, str]], below: str) -> build.ThresholdsConfig:
    """Return limits as steps, from the colour of what is below the first."""
    steps = [model.Threshold(value=None, color=below)]
    steps += [model.Threshold(value=value, color=colour) for value, colour in limits]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.kind == "stacked"
    legend = common.VizLegendOptions().show_legend(True)
    legend.display_mode(shapes.LegendDisplayMode.TABLE).placement(shapes.LegendPlacement.BOTTOM)
    legend.calcs(["mean", "max", "lastNotNull"])
    tooltip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().unit(panel.unit).legend(legend)
    made.tooltip(tooltip.sort(shapes.SortOrder.DESCENDING))
    made.line_width(1).fill_opacity(60 if stacked else 8).show_points(shapes.VisibilityMode.NEVER)
    if stacked:
        made.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
    if panel.limits:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        made.thresholds(thresholds(panel.limits, panel.below)).thresholds_style(style)
    if panel.low is not None:
        made.min(panel.low)
    if panel.high is not None:
        made.max(panel.high)
    return made


def _number(panel: Panel) -> stat.Panel:
    made = stat.Panel().unit(panel.unit).graph_mode(shapes.BigValueGraphMode.NONE)
    made.color_mode(
        shapes.BigValueColorMode.BACKGROUND
        if panel.limits or panel.words
        else shapes.BigValueColorMode.NONE
    )
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    made.thresholds(thresholds(panel.limits, panel.below)).no_value("no data")
    if panel.words:
        options = {
            value: model.ValueMappingResult(text=word, color=colour)
            for value, word, colour in panel.words
        }
        made.mappings([model.ValueMap(options=options)])
    return made


def _heatmap(panel: Panel) -> heatmap.Panel:
    axis = heatmap.YAxisConfig().unit(panel.unit)
    colours = heatmap.HeatmapColorOptions().mode(heat_shapes.HeatmapColorMode.SCHEME)
    made = heatmap.Panel().calculate(False).y_axis(axis)
    made.color(colours.scheme("Turbo").steps(64)).cell_gap(1)
    # A cell without anything is left dark.
    return made.filter_values(heatmap.FilterValueRange().le(1e-9))


def _table(panel: Panel) -> table.Panel:
    made = table.Panel().unit(panel.unit).filterable(True)
    names = {f"Value #{chr(ord('A') + n)}": q.legend for n, q in enumerate(panel.queries)}
    if len(panel.queries) > 1:
        made.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    else:
        names = {"Value": panel.queries[0].legend}
    return made.with_transformation(organized(hidden=("Time", "__name__", "job"), names=names))


def organized(*, hidden: Sequence[str], names: Mapping[str, str]) -> model.DataTransformerConfig:
    """Return the transformation that leaves columns out and names others."""
    options = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {},
        "renameByName": dict(names),
    }
    return model.DataTransformerConfig(id_val="organize", options=options)


LOOKS: Mapping[str, Callable[[Panel], Builder]] = MappingProxyType(
    {
        "lines": _lines,
        "stacked": _lines,
        "number": _number,
        "heatmap": _heatmap,
        "table": _table,
    }
)
