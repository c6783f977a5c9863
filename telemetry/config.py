"""Telemetry's configuration: how much is kept, for how long, and who may read how much of it.

Owns every telemetry setting with its help; the command line and the docs are made from these
fields. server/config.py composes it and calls `check` at start. Reads no environment and opens
nothing: the default history folder is decided by server/config.py.
"""

from dataclasses import dataclass, field
from typing import Any


class TelemetryConfigError(Exception):
    """The operator asked for something that cannot be: one line naming the flag."""


def setting(help: str, default: Any, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field that carries its help and choices for the command line."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Settings of bus, history, SQL, stream and metrics."""

    history: str | None = setting("folder that keeps the history; None keeps none", None)
    history_bytes_max: int = setting("bytes of history above which no more is kept", 10 * 2**30)
    ring_records: int = setting("records the live ring holds for streams that fall behind", 8192)
    stream_readers_max: int = setting("most open telemetry streams", 64)
    sql_rows_max: int = setting("most rows one SQL answer carries", 10_000)
    sql_deadline_s: float = setting("seconds after which a SQL query is stopped", 10.0)
    vllm_metrics: bool = setting("also export metrics under vLLM's names", True)


def check(config: TelemetryConfig) -> None:
    """Raise TelemetryConfigError for the first setting out of its range."""
    for name, low in (
        ("history_bytes_max", 2**20),
        ("ring_records", 1),
        ("stream_readers_max", 1),
        ("sql_rows_max", 1),
        ("sql_deadline_s", 0.01),
    ):
        value = getattr(config, name)
        if not value >= low:  # a NaN fails this comparison too
            flag = "--" + name.replace("_", "-")
            raise TelemetryConfigError(f"{flag} must be at least {low}, not {value}")
