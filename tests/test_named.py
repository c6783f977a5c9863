"""Named queries as files: headers that are checked, parameters that are typed, text that is safe.

Owns the proofs of telemetry/named.py on its own files and on bad ones; what the queries answer is
proved in test_post_mortems.py, test_over_time.py and test_lints.py.
"""

import re
from pathlib import Path

import duckdb
import pytest

from telemetry.named import (
    CHARTS,
    POINTS,
    SQL,
    WINDOW,
    HeaderError,
    ParameterError,
    catalogue,
    of_kind,
    read_folder,
)
from telemetry.named_document import QUESTIONS, document
from telemetry.schema import ddl

HEADER = "-- title: T\n-- meaning: M\n-- unit: ms\n-- chart: table\n-- window: no\n"
NAMES = tuple(catalogue())

ASKED_FOR = {
    "post_mortem": {
        *("why_waiting", "slowest_requests", "who_held_the_kv", "recompute_tax"),
        *("neighbour_stalls", "goodput", "request_timeline", "row_moves", "operating_point"),
        "what_changed",
    },
    "lint": {
        *("preemption_thrash", "starvation", "idle_kv_with_queue", "padding_waste"),
        *("graph_misses", "slow_host", "telemetry_gaps"),
    },
}


@pytest.fixture(scope="module")
def empty() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for statement in ddl():
        connection.execute(statement)
    return connection


def folder_with(tmp_path: Path, text: str, kind: str = "lint") -> Path:
    for name in ("window", "points"):
        (tmp_path / f"{name}.sql").write_text((SQL / f"{name}.sql").read_text())
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "one.sql").write_text(text)
    return tmp_path


# ---- our own files


@pytest.mark.parametrize("kind", ASKED_FOR)
def test_every_query_that_was_promised_is_there(kind: str) -> None:
    assert {query.name for query in of_kind(kind)} >= ASKED_FOR[kind]


@pytest.mark.parametrize("name", NAMES)
def test_a_query_is_one_select_that_runs_on_an_empty_record(
    empty: duckdb.DuckDBPyConnection, name: str
) -> None:
    query = catalogue()[name]
    bound = query.bind({p.name: "req-1" for p in query.parameters if p.required})
    (statement,) = empty.extract_statements(bound.sql)
    assert statement.type == duckdb.StatementType.SELECT
    answer = empty.execute(bound.sql, bound.parameters)
    columns = [column[0] for column in answer.description]
    assert len(set(columns)) == len(columns)
    rows = answer.fetchall()
    if query.kind != "post_mortem":
        assert rows == []
        assert columns[0] == "run_id"
    if query.chart in {"lines", "stacked"}:
        assert columns[0] == "at_unix_us"
        assert {parameter.name for parameter in query.parameters} >= {"points", "from_unix_us"}


@pytest.mark.parametrize("path", sorted(SQL.rglob("*.sql")), ids=lambda path: path.stem)
def test_a_file_is_short_and_its_lines_too(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100 or line != line.rstrip()] == []


def test_what_a_query_says_is_said_well() -> None:
    for query in catalogue().values():
        assert query.chart in CHARTS
        assert query.meaning.endswith("."), query.name
        assert not query.title.endswith("."), query.name
        for parameter in query.parameters:
            assert not parameter.doc.endswith("."), f"{query.name}.{parameter.name}"
        if query.windowed:
            assert query.parameters[: len(WINDOW)] == WINDOW


def test_every_threshold_of_a_lint_has_a_default_and_says_why() -> None:
    for query in of_kind("lint"):
        own = [parameter for parameter in query.parameters if parameter not in (*WINDOW, POINTS)]
        assert own, f"{query.name} has no threshold"
        for parameter in own:
            assert parameter.default is not None
            assert len(parameter.doc) > 20, f"{query.name}.{parameter.name} gives no reason"


def test_the_page_that_lists_them_is_current() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "queries.md"
    remedy = "run: python -m telemetry.named_document > docs/queries.md"
    assert page.read_text() == document(), remedy
    for _, names in QUESTIONS:
        assert set(names) <= set(catalogue())


# ---- headers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SELECT 1", "title"),
        (HEADER.replace("-- unit: ms\n", "") + "SELECT 1", "unit"),
        (HEADER + "-- title: again\nSELECT 1", "title"),
        (HEADER.replace("table", "pie") + "SELECT 1", "chart is one of"),
        (HEADER.replace("window: no", "window: maybe") + "SELECT 1", "window one of"),
        (HEADER + "-- colour: red\nSELECT 1", "not a line of a header: colour: red"),
        (HEADER + "-- parameter: x\nSELECT $x", "not `name type low..high = default; doc`"),
        (HEADER + "-- parameter: x integer = 3; d\nSELECT $x", "x needs its range"),
        (HEADER + "-- parameter: x integer 1..2 = 1; d\nSELECT 1", "differ: x"),
        (HEADER + "SELECT $y", "differ: y"),
        (
            HEADER.replace("window: no", "window: yes") + "-- parameter: last_s text; d\nSELECT 1",
            "twice",
        ),
    ],
)
def test_a_wrong_header_is_refused_by_file_and_reason(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(HeaderError, match=re.escape(problem)) as refused:
        list(read_folder(folder_with(tmp_path, text)))
    assert "one.sql" in str(refused.value)


def test_a_default_out_of_its_range_is_refused(tmp_path: Path) -> None:
    text = HEADER + "-- parameter: x integer 5..9 = 3; d\nSELECT $x"
    with pytest.raises(ParameterError, match="x: must be at least 5"):
        list(read_folder(folder_with(tmp_path, text)))


def test_a_name_stands_for_one_query(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, HEADER + "SELECT 1")
    (folder / "law").mkdir()
    (folder / "law" / "one.sql").write_text(HEADER + "SELECT 1")
    with pytest.raises(HeaderError, match="there is another one"):
        list(read_folder(folder))


def test_a_text_goes_on_in_the_lines_below(tmp_path: Path) -> None:
    text = HEADER.replace("M\n", "first\n--   second\n") + "SELECT 1"
    (query,) = read_folder(folder_with(tmp_path, text))
    assert query.meaning == "first second"


# ---- parameters


def refused(name: str, **given: object) -> str:
    with pytest.raises(ParameterError) as error:
        catalogue()[name].bind(given)
    assert error.value.parameter in given or error.value.parameter == "request"
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"requests": "many"}, "requests: must be an integer"),
        ({"requests": "1.5"}, "requests: must be an integer"),
        ({"requests": 1.5}, "requests: must be an integer"),
        ({"requests": True}, "requests: must be an integer"),
        ({"requests": None}, "requests: must be an integer"),
        ({"requests": [1]}, "requests: must be an integer"),
        ({"requests": ""}, "requests: must be an integer"),
        ({"requests": 0}, "requests: must be at least 1"),
        ({"requests": "-3"}, "requests: must be at least 1"),
        ({"requests": 10**30}, "requests: must be at most 1000"),
        ({"requests": "9" * 6000}, "requests: must be an integer"),
        ({"last_s": "nan"}, "last_s: must be a number"),
        ({"last_s": float("inf")}, "last_s: must be a number"),
        ({"last_s": "soon"}, "last_s: must be a number"),
        ({"last_s": 0}, "last_s: must be at least 0.001"),
        ({"last_s": None}, "last_s: must be a number"),
        ({"from_unix_us": -1}, "from_unix_us: must be at least 0"),
        ({"from_unix_us": 1.5e9}, None),
        ({"from_unix_us": 2, "to_unix_us": 2}, "from_unix_us: must be before to_unix_us"),
        ({"run_id": 5}, "run_id: must be a text"),
        ({"run_id": ""}, "run_id: must be a text"),
        ({"run_id": "a\0b"}, "run_id: must be a text"),
        ({"run_id": "x" * 201}, "run_id: has at most 200 characters"),
        ({"colour": "red"}, "colour: slowest_requests does not take it; it takes from_unix_us"),
    ],
)
def test_a_bad_parameter_is_refused_by_its_name(
    given: dict[str, object], message: str | None
) -> None:
    if message is None:
        catalogue()["slowest_requests"].bind(given)
    else:
        assert refused("slowest_requests", **given).startswith(message)


def test_a_required_parameter_has_no_default() -> None:
    assert refused("request_timeline").startswith("request: is missing: id of the sequence")
    assert refused("request_timeline", request=None) == "request: must be a text"


def test_values_are_bound_and_never_written_into_the_text(
    empty: duckdb.DuckDBPyConnection,
) -> None:
    evil = "'; DROP TABLE run; --"
    query = catalogue()["request_timeline"]
    bound = query.bind({"request": evil})
    assert evil not in bound.sql
    assert bound.parameters == [evil]
    assert empty.execute(bound.sql, bound.parameters).fetchall() == []
    assert bound.sql == query.bind({"request": "other"}).sql
    assert "$request" in query.sql


def test_text_of_an_address_and_json_values_mean_the_same() -> None:
    query = catalogue()["goodput"]
    text = query.bind({"points": "12", "ttft_ms": "250", "to_unix_us": "1796000000000000"})
    assert text == query.bind({"points": 12, "ttft_ms": 250, "to_unix_us": 1796000000000000})
    assert text.parameters == [None, 1796000000000000, 900.0, None, 12, 250.0, 100.0]
