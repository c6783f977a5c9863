"""Settings from a file: `--config FILE.toml`, and the same settings printed as such a file.

Owns the reading of TOML into settings by their fields' names, and the writing of it; config.py
joins them with the flags, which come first. A name that is no setting, and a value of the wrong
type, is a ConfigError that names the file and the key. Must never guess what was meant.
"""

import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from engine.config import ConfigError

BYTES_MAX = 2**20

Hints = Mapping[str, object]


def read_settings(file: str, tables: Mapping[str, Hints]) -> dict[str, Any]:
    """Return the settings of a TOML file by name; raises ConfigError.

    tables hold each table's settings with their types. Settings stand under the table they belong
    to, or above all tables; names may have dashes, as flags have. `history = false` keeps none.
    """
    everything = {name: hint for hints in tables.values() for name, hint in hints.items()}
    found: dict[str, Any] = {}
    for key, value in _parsed(file).items():
        if isinstance(value, dict):
            if key not in tables:
                raise ConfigError(f"{file}: [{key}] is no table; there are {', '.join(tables)}")
            inner, hints, place = value, tables[key], f"{key}."
        else:
            inner, hints, place = {key: value}, everything, ""
        for name, given in inner.items():
            field = name.replace("-", "_")
            if field not in hints:
                raise ConfigError(f"{file}: {place}{name} is no setting{_advice(field, hints)}")
            if field in found:
                raise ConfigError(f"{file}: {place}{name} is set twice")
            found[field] = _value(file, place + name, given, hints[field])
    return found


def as_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return settings as a TOML file; those that are not set, and keys, stand as comments."""
    parts = []
    for table, settings in tables.items():
        lines = []
        for name, value in settings.items():
            if name == "history" and value is None:
                lines.append("history = false")
            elif value is None or name == "api_key":
                lines.append(f"# {name} =")
            else:
                lines.append(f"{name} = {_toml(value)}")
        parts.append("\n".join([f"[{table}]", *lines]) + "\n")
    return "\n".join(parts)


def _parsed(file: str) -> dict[str, Any]:
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from error
    if len(raw) > BYTES_MAX:
        raise ConfigError(f"--config {file}: more than {BYTES_MAX} bytes")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file}: not valid TOML: {error}") from None


def _advice(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _value(file: str, place: str, given: Any, hint: object) -> Any:
    """Return a value as its field has it, or raise: nothing is converted but whole to real."""
    optional = get_origin(hint) in (Union, types.UnionType)
    kinds = [part for part in get_args(hint) if part is not type(None)] if optional else [hint]
    kind = kinds[0]
    if optional and given is False and kind is not bool:
        return None
    if kind is float and type(given) is int:
        return float(given)
    if get_origin(kind) is tuple and isinstance(given, list):
        if all(isinstance(item, str) for item in given):
            return tuple(given)
    elif type(given) is kind:
        return given
    wanted = "a list of texts" if get_origin(kind) is tuple else _named(kind)
    raise ConfigError(f"{file}: {place} is to be {wanted}, not {given!r:.60}")


def _named(kind: object) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind, str(kind)) if isinstance(kind, type) else str(kind)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
