"""Named queries: SELECTs kept as .sql files, with a header that says what they answer and take.

Owns the reading of telemetry/sql/ (post-mortems, lints, laws), the check of every header, and the
binding of parameters: typed, within their range, always as prepared parameters. The telemetry API,
`iterscope lint` and `iterscope sql` ask through it. Never runs a query itself, and never puts a
value into a query's text.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

SQL = Path(__file__).parent / "sql"
KINDS_OF_QUERY = ("post_mortem", "lint", "law")
"""The folders under telemetry/sql/, in the order in which queries are listed."""

CHARTS = ("table", "lines", "stacked", "bars", "scatter")
"""How an answer is drawn. lines, stacked: the first column is at_unix_us, each other one a series;
bars: the first column is the label, the second the value; scatter: x, then y."""

SQL_TYPE = MappingProxyType({"integer": "BIGINT", "number": "DOUBLE", "text": "VARCHAR"})
TEXT_CHARACTERS_MAX = 200
UNIX_US_MAX = 4 * 10**15

_PARAMETER = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*) (?P<type>integer|number|text)"
    r"(?: (?P<low>[\d.]+)\.\.(?P<high>[\d.]+))?(?: = (?P<default>\S+))?; (?P<doc>.+)"
)
_USE = re.compile(r"\$([a-z][a-z0-9_]*)")
_HEADER_KEYS = frozenset({"title", "meaning", "unit", "chart", "window", "parameter"})
_WINDOWS = ("no", "yes", "points")

Scalar = str | int | float | None


class HeaderError(ValueError):
    """A .sql file of ours is wrong: file, and what is wrong in its header or its text."""


class ParameterError(ValueError):
    """A value that a query cannot take; `parameter` is its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What a query takes: its type, range and default; `required` if there is no default."""

    name: str
    type: str
    doc: str
    required: bool = False
    default: Scalar = None
    low: float | None = None
    high: float | None = None

    def value_of(self, given: object) -> Scalar:
        """Return `given` (a JSON value, or text of a query string) as this type, or raise."""
        value = self._typed(given)
        if isinstance(value, int | float):
            if self.low is not None and value < self.low:
                raise ParameterError(self.name, f"must be at least {self.low:g}")
            if self.high is not None and value > self.high:
                raise ParameterError(self.name, f"must be at most {self.high:g}")
        return value

    def _typed(self, given: object) -> Scalar:
        if given is None and self.default is None and not self.required:
            return None
        if self.type == "text":
            if not isinstance(given, str) or not given or "\0" in given:
                raise ParameterError(self.name, "must be a text")
            if len(given) > TEXT_CHARACTERS_MAX:
                raise ParameterError(self.name, f"has at most {TEXT_CHARACTERS_MAX} characters")
            return given
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ParameterError(self.name, f"must be {self._article}")
        try:
            number = int(given) if self.type == "integer" else float(given)
        except (ValueError, OverflowError):
            raise ParameterError(self.name, f"must be {self._article}") from None
        if isinstance(number, float) and not math.isfinite(number):
            raise ParameterError(self.name, f"must be {self._article}")
        if isinstance(given, float) and number != given:
            raise ParameterError(self.name, f"must be {self._article}")
        return number

    @property
    def _article(self) -> str:
        return "an integer" if self.type == "integer" else "a number"


WINDOW = (
    Parameter(
        name="from_unix_us",
        type="integer",
        low=0,
        high=UNIX_US_MAX,
        doc="where the window begins on the wall clock, us; without it `last_s` counts",
    ),
    Parameter(
        name="to_unix_us",
        type="integer",
        low=0,
        high=UNIX_US_MAX,
        doc="where it ends (not within), us; without it the newest record is within",
    ),
    Parameter(
        name="last_s",
        type="number",
        default=900.0,
        low=0.001,
        high=1e9,
        doc="how long the window is, s, if its begin is not given",
    ),
    Parameter(name="run_id", type="text", doc="only this life of the server; without it all"),
)
"""What every windowed query takes."""

POINTS = Parameter(
    name="points",
    type="integer",
    default=60,
    low=1,
    high=2000,
    doc="how many equal buckets the window is cut into",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A query that can be run: its text, in which values are $1, $2..., and the values."""

    sql: str
    parameters: list[Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedQuery:
    """One .sql file: what it answers, in which unit, how it is drawn, what it takes.

    `sql` is the whole SELECT with parameters as $name; `windowed` says that it takes WINDOW.
    """

    name: str
    kind: str
    title: str
    meaning: str
    unit: str
    chart: str
    windowed: bool
    parameters: tuple[Parameter, ...]
    sql: str

    def bind(self, given: Mapping[str, object]) -> Bound:
        """Return the query with its values; raises ParameterError that names the one at fault."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                takes = ", ".join(known) or "no parameters"
                raise ParameterError(str(name), f"{self.name} does not take it; it takes {takes}")
        values = {name: _value(parameter, given) for name, parameter in known.items()}
        _check_window(values)
        place = {name: index for index, name in enumerate(known, 1)}

        def numbered(use: re.Match[str]) -> str:
            return f"CAST(${place[use[1]]} AS {SQL_TYPE[known[use[1]].type]})"

        return Bound(sql=_USE.sub(numbered, self.sql), parameters=list(values.values()))


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, NamedQuery]:
    """Return every query that comes with Iterscope by name: post-mortems, lints, then laws."""
    return MappingProxyType({query.name: query for query in read_folder(SQL)})


def of_kind(*kinds: str) -> list[NamedQuery]:
    """Return the queries of some kinds, in order."""
    return [query for query in catalogue().values() if query.kind in kinds]


def read_folder(folder: Path) -> Iterator[NamedQuery]:
    """Yield the queries under a folder laid out as telemetry/sql/; raises HeaderError."""
    before = {name: _text(folder / f"{name}.sql")[1] for name in ("window", "points")}
    seen: set[str] = set()
    for kind in KINDS_OF_QUERY:
        for path in sorted((folder / kind).glob("*.sql")):
            query = _read(path, before)
            if query.name in seen:
                raise HeaderError(f"{path}: there is another {query.name}")
            seen.add(query.name)
            yield query


def _value(parameter: Parameter, given: Mapping[str, object]) -> Scalar:
    if parameter.name in given:
        return parameter.value_of(given[parameter.name])
    if parameter.required:
        raise ParameterError(parameter.name, f"is missing: {parameter.doc}")
    return parameter.default


def _check_window(values: Mapping[str, Scalar]) -> None:
    begin, end = values.get("from_unix_us"), values.get("to_unix_us")
    if isinstance(begin, int) and isinstance(end, int) and begin >= end:
        raise ParameterError("from_unix_us", "must be before to_unix_us")


def _text(path: Path) -> tuple[list[str], str]:
    """Return a file's leading comment lines, without their dashes, and the rest."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return [line[2:] for line in lines[:count]], "\n".join(lines[count:]).strip()


def _read(path: Path, before: Mapping[str, str]) -> NamedQuery:
    comments, body = _text(path)
    header: dict[str, list[str]] = {}
    last: list[str] | None = None
    for comment in comments:
        key, colon, text = comment.strip().partition(": ")
        if comment.startswith("   ") and last:
            last[-1] += " " + comment.strip()
        elif colon and key in _HEADER_KEYS:
            last = header.setdefault(key, [])
            last.append(text)
        else:
            raise HeaderError(f"{path}: not a line of a header: {comment.strip()}")
    single = {key: _one(path, header, key) for key in ("title", "meaning", "unit", "chart")}
    window = _one(path, header, "window")
    if single["chart"] not in CHARTS or window not in _WINDOWS:
        raise HeaderError(f"{path}: chart is one of {CHARTS}, window one of {_WINDOWS}")
    prefix: Sequence[Parameter] = ()
    if window != "no":
        parts = [before["window"]] + ([before["points"]] if window == "points" else [])
        body = _behind(",\n".join(part.strip() for part in parts), body)
        prefix = (*WINDOW, POINTS) if window == "points" else WINDOW
    parameters = (*prefix, *(_parameter(path, text) for text in header.get("parameter", [])))
    _check_uses(path, body, parameters)
    return NamedQuery(
        name=path.stem,
        kind=path.parent.name,
        windowed=window != "no",
        parameters=parameters,
        sql=body,
        **single,
    )


def _one(path: Path, header: Mapping[str, list[str]], key: str) -> str:
    found = header.get(key, [])
    if len(found) != 1 or not found[0].strip():
        raise HeaderError(f"{path}: the header needs one line `-- {key}: ...`")
    return found[0].strip()


def _behind(common: str, body: str) -> str:
    """Put common table expressions before those of a SELECT."""
    if body.startswith("WITH "):
        return f"WITH {common},\n{body.removeprefix('WITH ')}"
    return f"WITH {common}\n{body}"


def _parameter(path: Path, text: str) -> Parameter:
    found = _PARAMETER.fullmatch(text)
    if found is None:
        raise HeaderError(f"{path}: not `name type low..high = default; doc`: {text}")
    low, high, default = found["low"], found["high"], found["default"]
    parameter = Parameter(
        name=found["name"],
        type=found["type"],
        doc=found["doc"],
        required=default is None,
        low=float(low) if low else None,
        high=float(high) if high else None,
    )
    if parameter.type != "text" and (low is None or high is None):
        raise HeaderError(f"{path}: {parameter.name} needs its range, low..high")
    if default in {None, "none"}:
        return parameter
    return replace(parameter, default=parameter.value_of(default))


def _check_uses(path: Path, body: str, parameters: Sequence[Parameter]) -> None:
    names = [parameter.name for parameter in parameters]
    used = set(_USE.findall(body))
    if len(set(names)) != len(names):
        raise HeaderError(f"{path}: a parameter stands twice")
    if used != set(names):
        odd = ", ".join(sorted(used ^ set(names)))
        raise HeaderError(f"{path}: declared and used parameters differ: {odd}")
