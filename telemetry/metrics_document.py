"""docs/metrics.md, made from the table: what each metric means, its unit, labels and edges.

Owns the document's words around the table; `python -m telemetry.metrics_document` prints it and a
test keeps it current. Reads nothing but the table. Must never say what the table does not.
"""

from telemetry.metric_spec import MetricSpec
from telemetry.metric_table import METRICS

OPENING = """\
# Metrics

Generated from `telemetry/metric_table.py` by \
`python -m telemetry.metrics_document > docs/metrics.md`; a test keeps it current.

`GET /metrics` answers in Prometheus' text format, or OpenMetrics where it is asked for. All metrics
have the labels `model_name` and `engine`. Durations are differences of one monotonic clock. Totals
count from the server's start and never fall; what happened is folded from the record, off the
engine's path, and one scrape is of one moment. Names that begin with `vllm:` have vLLM's meaning,
labels and bucket edges, with finer edges below; `--no-vllm-metrics` calls them `iterscope_`.
Values of closed labels are there from the start, as 0. *Query* names the named query
([queries.md](queries.md)) that tells the requests behind the figure.

| metric | type | unit | labels | meaning | query |
|---|---|---|---|---|---|"""


def document() -> str:
    """Return the whole of docs/metrics.md."""
    edges = [f"- `{spec.name}`: {_edges(spec)}" for spec in METRICS if spec.buckets]
    rows = [_row(spec) for spec in METRICS]
    return "\n".join([OPENING, *rows, "", "## Bucket edges", "", *edges])


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    query = f"`{spec.query}`" if spec.query else ""
    return f"| `{spec.name}` | {spec.type} | {spec.unit} | {labels} | {spec.help} | {query} |"


def _edges(spec: MetricSpec) -> str:
    return ", ".join(f"{edge:g}" for edge in spec.buckets)


def main() -> None:
    """Print the document."""
    print(document())  # noqa: T201  the program's purpose


if __name__ == "__main__":
    main()
