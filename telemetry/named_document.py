"""The page that lists the named queries: docs/queries.md, made from the headers of their files.

Owns the page's text and the six questions that lead into it; `python -m telemetry.named_document`
prints it and a test keeps it current. Must never say anything of a query that its header does not.
"""

import sys
from collections.abc import Iterable

from telemetry.named import POINTS, WINDOW, NamedQuery, Parameter, of_kind

QUESTIONS = (
    (
        "How often does the scheduler regain control?",
        ("step_intervals", "step_time", "slowest_steps"),
    ),
    ("When does a finished or cancelled request really leave?", ("departures",)),
    (
        "When does a new request become eligible, and what kept it out?",
        ("why_waiting", "longest_waits", "queue"),
    ),
    (
        "How does KV state follow a request while its batch row changes?",
        ("row_moves", "request_timeline", "who_held_the_kv"),
    ),
    (
        "How does the device carry ever-changing shapes?",
        ("batch_shapes", "operating_point"),
    ),
    (
        "Under overload, who limits admission?",
        ("why_waiting", "rejections", "preemptions", "tenants"),
    ),
)


def document() -> str:
    """Return the text of docs/queries.md."""
    shared = [_row(parameter.name, _default(parameter), parameter.doc) for parameter in WINDOW]
    shared.append(_row(POINTS.name, _default(POINTS), POINTS.doc + "; of queries over time"))
    questions = [
        f"{number}. {question} {', '.join(f'`{name}`' for name in names)}"
        for number, (question, names) in enumerate(QUESTIONS, 1)
    ]
    parts = [
        _OPENING,
        _table(("parameter", "default", "meaning"), shared),
        "## The six questions",
        "\n".join(questions),
        "## Post-mortems",
        _table(
            ("query", "what it says", "unit", "drawn as", "also takes"),
            [
                _row(f"`{q.name}`", f"**{q.title}.** {q.meaning}", q.unit, q.chart, _own(q))
                for q in of_kind("post_mortem")
            ],
        ),
        "## Lints",
        _LINTS,
        _table(
            ("lint", "what is wrong", "thresholds, and why"),
            [_row(f"`{q.name}`", f"**{q.title}.** {q.meaning}", _why(q)) for q in of_kind("lint")],
        ),
        "## Laws",
        _LAWS,
        _table(
            ("law", "what holds", "a row means"),
            [_row(f"`{q.name}`", q.title, q.meaning) for q in of_kind("law")],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    names = list(head)
    return "\n".join([_row(*names), "|" + "---|" * len(names), *rows])


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(parameter: Parameter) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _own_parameters(query: NamedQuery) -> list[Parameter]:
    return [parameter for parameter in query.parameters if parameter not in (*WINDOW, POINTS)]


def _own(query: NamedQuery) -> str:
    names = [f"`{p.name}` ({_default(p)})" for p in _own_parameters(query)]
    return ", ".join(names)


def _why(query: NamedQuery) -> str:
    return "; ".join(f"`{p.name}` {_default(p)}: {p.doc}" for p in _own_parameters(query))


_OPENING = """\
# Named queries

Generated from the files under `telemetry/sql/` by \
`python -m telemetry.named_document > docs/queries.md`; a test keeps it current.

Each is one SELECT over the record ([SCHEMA.md](../SCHEMA.md)) with its meaning, unit, chart and \
parameters in the file's header. Three ways to ask:

- `iterscope sql --query why_waiting -p last_s=60`, on a running server, a history folder or a \
file; `iterscope sql --list` lists them.
- `GET /telemetry/queries/why_waiting?last_s=60` answers as `POST /telemetry/sql` does, in the \
same sandbox; a `POST` takes the parameters as a JSON object. `GET /telemetry/queries` lists them.
- Copy the SQL from that list and change it: `$name` stands where a parameter goes.

Most look at a window of time. It ends with the newest record unless told otherwise, so that the \
same question works on a live server and on a file from last week:"""

_LINTS = """\
`iterscope lint` runs lints and laws: it exits 1 when one of them has a row, 0 when nothing is \
wrong. A lint has rows only when something is; its thresholds are parameters \
(`-p waited_s_max=10`)."""

_LAWS = """\
What must hold for every record, whatever the load. What is honestly missing (iterations that the \
engine dropped, records that the history lost, segments that retention took) is excused; nothing \
else is. A row is a fault of Iterscope."""


if __name__ == "__main__":
    sys.stdout.write(document())
