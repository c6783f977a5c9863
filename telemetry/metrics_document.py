"""docs/metrics.md, made from the table: what each metric means, its unit, labels and edges.

Owns the document's words around the table; `python -m telemetry.metrics_document` prints it and a
test keeps it current. Reads nothing but the table. Must never say what the table does not.
"""

from telemetry.metric_spec import MetricSpec
from telemetry.metric_table import METRICS, SECTIONS

HEAD = """\
| metric | type | unit | labels | meaning | query | vLLM |
|---|---|---|---|---|---|---|"""

OPENING = """\
# Metrics

Generated from `telemetry/metric_table.py` by \
`python -m telemetry.metrics_document > docs/metrics.md`; a test keeps it current.

`GET /metrics` answers in Prometheus' text format, or OpenMetrics where it is asked for. All metrics
have the labels `model_name` and `engine`. Durations are differences of one monotonic clock. Totals
count from the server's start and never fall; what happened is folded from the record, off the
engine's path, and one scrape is of one moment. Values of closed labels are there from the start,
as 0. A sequence is one answer: a request with `n` answers counts as `n`.

Each metric has a name that begins with `iterscope_`. Where vLLM has the same, with the same type,
labels and bucket edges (ours are finer below), its names are exported beside ours, so that
dashboards, autoscalers and gateways made for vLLM read this server: column *vLLM*, and the last
section for those of another shape. `--no-vllm-aliases` leaves all of these out, and a scrape is
half as long; our own dashboards and alerts never read them.

*Query* names the named query ([queries.md](queries.md)) that tells the requests behind the figure.
`explain` means `iterscope explain ID`: in OpenMetrics the buckets of all latencies carry a
`request_id` as exemplar, the last request that fell into each.
"""


def document() -> str:
    """Return the whole of docs/metrics.md."""
    parts = [OPENING]
    for title, specs in SECTIONS:
        parts += [f"## {title}", "", HEAD, *map(_row, specs), ""]
    edges = [f"- `{spec.name}`: {_edges(spec)}" for spec in METRICS if spec.buckets]
    return "\n".join([*parts, "## Bucket edges", "", *edges])


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    aliases = ", ".join(f"`{alias}`" for alias in spec.aliases)
    words = f"`{spec.name}` | {spec.type} | {spec.unit} | {labels} | {spec.help}"
    return f"| {words} | `{spec.query}` | {aliases} |"


def _edges(spec: MetricSpec) -> str:
    return ", ".join(f"{edge:g}" for edge in spec.buckets)


def main() -> None:
    """Print the document."""
    print(document())  # noqa: T201  the program's purpose


if __name__ == "__main__":
    main()
