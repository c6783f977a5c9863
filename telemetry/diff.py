"""Two sides compared: what was set differently, what changed by how much, and where the time went.

Owns the list of figures, the verdict on each, and the waterfall of causes. server/diff_command.py
reads both sides and prints what `compare` returns. A change counts only if it is larger than what
blocks of time differ by anyway, all comparisons holding together, and larger than anyone would care
about: A against A finds nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from telemetry.bootstrap import Floats, Statistic, estimate, half_width, ratio
from telemetry.records import CAUSES
from telemetry.sides import FACTS, Side

CONFIDENCE = 0.95
LEAST_SHARE = 0.02
"""Changes of less than this share of the figure are never called changes..."""
LEAST_OF_REQUEST = 0.005
"""...nor are parts of a request that change by less than this share of its mean time."""
BLOCKS_MIN = 8
TAIL_MIN = 30
"""A percentile is judged if so many values lie beyond it on either side."""

BY_PROMPT = ("tokenize", "own_prefill")
BY_OUTPUT = (
    "own_decode",
    "neighbour_prefill",
    "neighbour_decode",
    "scheduler",
    "padding",
    "passed_over",
    "output",
)
"""Causes whose time grows with a request's own tokens; of all others a request has what it has."""

PERCENTILES = (
    ("ttft", (50, 90, 99)),
    ("itl", (50, 99)),
    ("e2e", (50, 90, 99)),
    ("queue", (50, 90)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure on both sides; `low` and `high` bound b - a, None where nothing can be said.

    `verdict` is same, better, worse or unknown; of a cause, "better" means less of it.
    """

    name: str
    unit: str
    a: float
    b: float
    low: float | None
    high: float | None
    verdict: str

    @property
    def delta(self) -> float:
        """Return b - a."""
        return self.b - self.a


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that is not the same on both sides; each a JSON value, several if it changed."""

    name: str
    a: list[Any]
    b: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The comparison. `causes` are ms of a mean request on both sides, doing the same work.

    Their changes and that of `workload`, other lengths of prompts and answers, sum to that of
    `request`. Changes beyond chance come first, the largest in the whole's direction before all.
    `notes` say in people's words what limits the verdicts.
    """

    settings: list[Setting]
    figures: list[Change]
    request: Change
    workload: Change
    causes: list[Change]
    notes: list[str]

    @property
    def significant(self) -> bool:
        """Return whether anything changed beyond chance."""
        return any(c.verdict in ("better", "worse") for c in (*self.figures, *self.causes))

    @property
    def worse(self) -> bool:
        """Return whether any figure got worse beyond chance."""
        return any(change.verdict == "worse" for change in self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """How a figure is computed on a side, and what makes a change of it worth a word.

    A statistic times `scale` is in `unit`: those of times are in ns. `of_request`: a part of a
    request's life, of which the smallest are not worth a word.
    """

    name: str
    a: Statistic
    b: Statistic
    unit: str = "ms"
    scale: float = 1e-6
    more_is_better: bool = False
    of_request: bool = False
    judged: bool = True


def compare(a: Side, b: Side) -> Diff:
    """Return what differs between two sides; all intervals hold together at CONFIDENCE."""
    figures = list(_figures(a, b))
    request, workload, parts = _cause_figures(a, b)
    judged = sum(figure.judged for figure in (*figures, request, workload, *parts))
    mean_ns = [_value(request.a, a), _value(request.b, b)]
    judge = _Judge(a, b, comparisons=judged, least_ns=LEAST_OF_REQUEST * float(np.mean(mean_ns)))
    whole = judge.change(request)
    up = 1.0 if whole.delta >= 0 else -1.0
    return Diff(
        settings=_changed_settings(a, b),
        figures=[judge.change(figure) for figure in figures],
        request=whole,
        workload=judge.change(workload),
        causes=sorted(
            map(judge.change, parts),
            key=lambda change: (change.verdict in ("same", "unknown"), -up * change.delta),
        ),
        notes=_notes(a, b),
    )


def _figures(a: Side, b: Side) -> Iterator[Figure]:
    for name, one, two in (
        ("requests ended", a.requests, b.requests),
        ("decode tokens", a.work[:, 2], b.work[:, 2]),
    ):
        yield Figure(
            name=name,
            unit="1/s",
            scale=1.0,
            a=ratio(one, a.seconds),
            b=ratio(two, b.seconds),
            more_is_better=True,
        )
    yield Figure(
        name="host time a step",
        a=ratio(a.busy_ns - a.device_ns, a.work[:, 0]),
        b=ratio(b.busy_ns - b.device_ns, b.work[:, 0]),
    )
    model = a.model if a.model is not None else b.model
    if model is not None:
        # Steps of other sizes take other times: only at the same work is a device slower.
        yield Figure(
            name="device, same work",
            unit="of A",
            scale=1.0,
            a=ratio(a.device_ns, a.work @ model),
            b=ratio(b.device_ns, b.work @ model),
        )
    for name, percentiles in PERCENTILES:
        before, after = a.histograms[name], b.histograms[name]
        for percent in percentiles:
            beyond = min(before.total, after.total) * min(percent, 100 - percent) / 100
            yield Figure(
                name=f"{name} p{percent}",
                a=before.quantile(percent / 100),
                b=after.quantile(percent / 100),
                of_request=name == "queue",
                judged=beyond >= TAIL_MIN,
            )


def _cause_figures(a: Side, b: Side) -> tuple[Figure, Figure, list[Figure]]:
    """Return a request's mean time, what other lengths change of it, and each cause at equal ones.

    A cause's time is a rate (by output token, prompt token or request) times how many of these a
    request has: mean(b) - mean(a) is the change of rates at the mean length, and the change of
    lengths at the mean rate (Kitagawa, 1955), without a rest.
    """
    sides = (a, b)
    units = [{name: _units(side, name) for name in CAUSES} for side in sides]
    even = {name: _even(name, a, b, units) for name in CAUSES}
    columns = {name: column for column, name in enumerate(CAUSES)}
    seen = [n for n in CAUSES if any(side.causes[:, columns[n]].any() for side in sides)]

    def adjusted(place: int, name: str) -> Statistic:
        rate = ratio(sides[place].causes[:, columns[name]], units[place][name])
        return lambda weights: rate(weights) * even[name]

    def other_lengths(place: int) -> Statistic:
        whole = ratio(sides[place].causes.sum(axis=1), sides[place].explained)
        rates = [adjusted(place, name) for name in seen]
        return lambda weights: whole(weights) - sum(rate(weights) for rate in rates)

    whole = [ratio(side.causes.sum(axis=1), side.explained) for side in sides]
    return (
        Figure(name="request", a=whole[0], b=whole[1], of_request=True),
        Figure(name="workload", a=other_lengths(0), b=other_lengths(1), of_request=True),
        [Figure(name=n, a=adjusted(0, n), b=adjusted(1, n), of_request=True) for n in seen],
    )


def _units(side: Side, cause: str) -> Floats:
    """Return what a cause's time goes with, by block."""
    if cause in BY_PROMPT:
        return side.prompts
    return side.outputs if cause in BY_OUTPUT else side.explained


def _even(cause: str, a: Side, b: Side, units: list[dict[str, Floats]]) -> float:
    """Return how many units a request has, the mean of both sides; NaN where one has none."""
    shares = [
        float(ratio(units[place][cause], side.explained)(np.ones((1, side.blocks)))[0])
        for place, side in enumerate((a, b))
    ]
    return sum(shares) / 2


class _Judge:
    """Says of each figure whether it changed."""

    def __init__(self, a: Side, b: Side, *, comparisons: int, least_ns: float) -> None:
        self._a = a
        self._b = b
        self._comparisons = comparisons
        self._least_ns = least_ns

    def change(self, figure: Figure) -> Change:
        """Return a figure on both sides with its verdict."""
        one = estimate(figure.a, self._a.blocks)
        two = estimate(figure.b, self._b.blocks)
        width = half_width(one, two, confidence=CONFIDENCE, comparisons=self._comparisons)
        known = (
            figure.judged
            and min(one.blocks, two.blocks) >= BLOCKS_MIN
            and math.isfinite(one.value + two.value + width)
        )
        delta = two.value - one.value
        least = max(LEAST_SHARE * abs(one.value), self._least_ns if figure.of_request else 0.0)
        verdict = "same" if known else "unknown"
        if known and abs(delta) > max(width, least):
            verdict = "better" if (delta > 0) == figure.more_is_better else "worse"
        return Change(
            name=figure.name,
            unit=figure.unit,
            a=one.value * figure.scale,
            b=two.value * figure.scale,
            low=(delta - width) * figure.scale if known else None,
            high=(delta + width) * figure.scale if known else None,
            verdict=verdict,
        )


def _value(statistic: Statistic, side: Side) -> float:
    return float(statistic(np.ones((1, side.blocks)))[0])


def _notes(a: Side, b: Side) -> list[str]:
    notes = []
    for name, side in (("A", a), ("B", b)):
        requests, explained = int(side.requests.sum()), int(side.explained.sum())
        if not requests:
            notes.append(f"{name} has no request that ended by itself")
        elif explained < requests:
            notes.append(f"{name}: {requests - explained} of {requests} requests have no causes")
        if side.blocks < BLOCKS_MIN:
            notes.append(f"{name} is too short a range to judge")
    return notes


def _changed_settings(a: Side, b: Side) -> list[Setting]:
    one, two = _settings(a), _settings(b)
    changed = []
    for name in {**one, **two}:
        values = [list(_distinct(side.get(name, []))) for side in (one, two)]
        if values[0] != values[1]:
            changed.append(Setting(name=name, a=values[0], b=values[1]))
    return changed


def _settings(side: Side) -> dict[str, list[Any]]:
    """Return every setting with the values it had, an engine each."""
    found: dict[str, list[Any]] = {}
    for run in side.settings:
        for name in FACTS:
            found.setdefault(name, []).append(run[name])
        for name, value in _flat(_decoded(run["config"]), "config"):
            found.setdefault(name, []).append(value)
    return found


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, value


def _distinct(values: list[Any]) -> Iterator[Any]:
    for place, value in enumerate(values):
        if value not in values[:place]:
            yield value
