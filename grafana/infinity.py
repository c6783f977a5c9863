"""Questions to Iterscope's own SQL, as the Infinity datasource asks them: a POST that answers CSV.

Owns the shape of such a query and the columns of its answer; post_mortem.py makes panels of them.
The datasource holds the server's address and key, so that no dashboard does. Must never put a
value into the text of a query: named ones take the time shown as parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import dashboard as model

from telemetry.named import NamedQuery
from telemetry.schema import ddl

KIND = "yesoreyeram-infinity-datasource"
SOURCE = "${sql_source}"
TIMES = "_unix_us"
NUMBERS = ("BIGINT", "INTEGER", "DOUBLE", "HUGEINT", "DECIMAL", "UBIGINT")


@dataclass(frozen=True, slots=True)
class Target(Builder[Dataquery]):
    """One POST whose answer is CSV, as the query of a panel."""

    path: str
    body: str
    columns: Mapping[str, str]

    def build(self) -> Dataquery:
        """Return it in the datasource's own terms."""
        headers = [{"key": "Accept", "value": "text/csv"}]
        return UnknownDataquery(
            {
                "refId": "A",
                "datasource": {"type": KIND, "uid": SOURCE},
                "type": "csv",
                "source": "url",
                "parser": "backend",
                "format": "table",
                "url": self.path,
                "url_options": {
                    "method": "POST",
                    "body_type": "raw",
                    "body_content_type": "application/json",
                    "data": self.body,
                    "headers": headers,
                    "params": [],
                },
                "csv_options": {"delimiter": ","},
                "root_selector": "",
                "columns": [
                    {"selector": name, "text": name, "type": kind}
                    for name, kind in self.columns.items()
                ],
                "filters": [],
            }
        )


def named(query: NamedQuery, columns_max: int | None = None) -> Target:
    """Return a named query over the time that the dashboard shows, if it looks at a window.

    `columns_max`: only so many of its columns, from the first.
    """
    window = '{"from_unix_us": ${__from}000, "to_unix_us": ${__to}000}' if query.windowed else "{}"
    columns = dict(list(columns_of(query).items())[:columns_max])
    return Target(f"/telemetry/queries/{query.name}", window, columns)


def free(variable: str) -> Target:
    """Return the SELECT that stands in a variable; its columns are what it has."""
    body = f'{{"sql": ${{{variable}:doublequote}}, "format": "csv"}}'
    return Target("/telemetry/sql", body, {})


def columns_of(query: NamedQuery) -> dict[str, str]:
    """Return a query's columns and their types in Infinity's words, from a record without rows."""
    bound = query.bind({})
    with duckdb.connect() as database:
        for statement in ddl():
            database.execute(statement)
        database.execute(bound.sql, bound.parameters)
        described = database.description or []
    return {str(name): _word(str(kind)) for name, kind, *_ in described}


def _word(kind: str) -> str:
    if kind.endswith("]"):
        return "string"
    if kind == "BOOLEAN":
        return "boolean"
    return "number" if kind.startswith(NUMBERS) or kind == "NUMBER" else "string"


def times_shown(columns: Sequence[str]) -> list[model.DataTransformerConfig]:
    """Return the transformations by which microseconds since 1970 are shown as instants."""
    steps: list[tuple[str, object]] = []
    for name in columns:
        if name.endswith(TIMES):
            plain = name.removesuffix(TIMES)
            division = {"left": name, "operator": "/", "right": "1000"}
            made = {"mode": "binary", "alias": plain, "binary": division, "replaceFields": False}
            conversion = {"targetField": plain, "destinationType": "time"}
            steps += [
                ("calculateField", made),
                ("convertFieldType", {"conversions": [conversion], "fields": {}}),
            ]
    if steps:
        hidden = {name: True for name in columns if name.endswith(TIMES)}
        order = {name.removesuffix(TIMES): place for place, name in enumerate(columns)}
        steps.append(
            ("organize", {"excludeByName": hidden, "indexByName": order, "renameByName": {}})
        )
    return [model.DataTransformerConfig(id_val=name, options=options) for name, options in steps]
