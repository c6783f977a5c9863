"""The text of a scrape: Prometheus' plain format and OpenMetrics, from families of values.

Owns names, escapes, numbers, bucket lines and exemplars of both formats; metrics.py gives it the
families of one moment. Lines are written here and not by a library since a scrape holds the event
loop, and thousands of lines cost it a few milliseconds this way and not tens. Keeps the beginning
of each line it has written, of at most STARTS_MAX.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from telemetry.histogram import Histogram, LabelValues, Mark, Values
from telemetry.metric_spec import BASE_LABELS, MetricSpec

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
STARTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Family:
    """One metric at one moment, under one of its names."""

    name: str
    spec: MetricSpec
    values: Values


class Exposition:
    """Writes families as text. `base` are the values of BASE_LABELS."""

    def __init__(self, base: LabelValues) -> None:
        self._base = base
        self._starts: dict[tuple[str, LabelValues], tuple[str, ...]] = {}

    def plain(self, families: Iterable[Family]) -> bytes:
        """Return Prometheus' plain text."""
        lines: list[str] = []
        for family in families:
            lines.append(_head(family, family.name, "\\\n"))
            lines += self._samples(family, None)
        return "\n".join([*lines, ""]).encode()

    def openmetrics(self, families: Iterable[Family], *, zero_unix_us: int) -> bytes:
        """Return OpenMetrics, with exemplars; `zero_unix_us` is the wall clock at instant 0."""
        lines: list[str] = []
        for family in families:
            counter = family.spec.type == "counter"
            name = family.name.removesuffix("_total") if counter else family.name
            lines.append(_head(family, name, '\\\n"'))
            lines += self._samples(family, zero_unix_us)
        return "\n".join([*lines, "# EOF", ""]).encode()

    def _samples(self, family: Family, zero_unix_us: int | None) -> Iterator[str]:
        for labels, value in family.values.items():
            starts = self._starts.get((family.name, labels))
            if starts is None:
                starts = self._begin(family, labels, value)
            if isinstance(value, Histogram):
                yield from _histogram(starts, value, zero_unix_us)
            else:
                yield starts[0] + _number(value)

    def _begin(self, family: Family, labels: LabelValues, value: object) -> tuple[str, ...]:
        """Return what the lines of a series begin with, and keep it."""
        names = (*BASE_LABELS, *family.spec.labels)
        pairs = ",".join(
            f'{name}="{_escaped(text)}"'
            for name, text in zip(names, (*self._base, *labels), strict=True)
        )
        starts: tuple[str, ...] = (f"{family.name}{{{pairs}}} ",)
        if isinstance(value, Histogram):
            edges = [*map(_number, value.edges), "+Inf"]
            starts = (
                *(f'{family.name}_bucket{{{pairs},le="{edge}"}} ' for edge in edges),
                f"{family.name}_count{{{pairs}}} ",
                f"{family.name}_sum{{{pairs}}} ",
            )
        if len(self._starts) >= STARTS_MAX:
            del self._starts[next(iter(self._starts))]
        self._starts[family.name, labels] = starts
        return starts


def _histogram(
    starts: tuple[str, ...], value: Histogram, zero_unix_us: int | None
) -> Iterator[str]:
    total = 0
    for start, count, mark in zip(starts, value.counts, value.marks, strict=False):
        total += count
        if mark is None or zero_unix_us is None or not mark[0]:
            yield f"{start}{total}.0"
        else:
            yield f"{start}{total}.0{_exemplar(mark, zero_unix_us)}"
    yield f"{starts[-2]}{total}.0"
    yield starts[-1] + _number(value.sum)


def _exemplar(mark: Mark, zero_unix_us: int) -> str:
    request_id, value, at_ns = mark
    at_s = (zero_unix_us + at_ns // 1000) / 1e6
    return f' # {{request_id="{_escaped(request_id)}"}} {value!r} {at_s:.3f}'


def _head(family: Family, name: str, unsafe: str) -> str:
    text = _escaped(family.spec.help, unsafe)
    return f"# HELP {name} {text}\n# TYPE {name} {family.spec.type}"


def _number(value: float) -> str:
    return repr(float(value))


def _escaped(text: str, unsafe: str = '\\\n"') -> str:
    for mark in unsafe:
        text = text.replace(mark, "\\n" if mark == "\n" else "\\" + mark)
    return text
