"""Telemetry's configuration: how much is kept, for how long, and who may read how much of it.

Owns every telemetry setting with its help; the command line and the docs are made from these
fields. server/config.py composes it and calls `check` at start. Reads no environment and opens
nothing: the default history folder is decided by server/config.py.
"""

import math
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class TelemetryConfigError(Exception):
    """The operator asked for something that cannot be: one line naming the flag."""


def setting(help: str, default: Any, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field that carries its help and choices for the command line."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Settings of bus, history, SQL, stream and metrics."""

    history: str | None = setting("folder that keeps the history; None keeps none", None)
    history_days: float = setting("days after which history is deleted", 7.0)
    history_bytes_max: int = setting("bytes above which the oldest history is deleted", 10 * 2**30)
    history_segment_s: float = setting("seconds of history that one new segment file holds", 60.0)
    incidents: bool = setting("record incidents (objectives missed, engine lost) into files", True)
    incident_s: float = setting("seconds before an incident that its file holds", 300.0)
    incident_pause_s: float = setting("least seconds between two incidents of a kind", 300.0)
    incidents_max: int = setting("most recorded files kept; the oldest go", 20)
    incidents_bytes_max: int = setting("most bytes of recorded files; the oldest go", 2 * 2**30)
    slo_burn_share: float = setting("share of a minute's requests late that is an incident", 0.5)
    slo_burn_requests: int = setting("least requests of a minute that are judged by it", 20)
    ring_records: int = setting("records the live ring holds for streams that fall behind", 8192)
    stream_readers_max: int = setting("most open telemetry streams", 64)
    sql_rows_max: int = setting("most rows one SQL answer carries", 10_000)
    sql_deadline_s: float = setting("seconds after which a SQL query is stopped", 10.0)
    vllm_aliases: bool = setting("export metrics under vLLM's names as well", True)
    otlp_endpoint: str | None = setting(
        "URL of an OTLP/HTTP receiver that metrics are sent to", None
    )
    otlp_interval_s: float = setting("seconds between two sendings", 60.0)


def check(config: TelemetryConfig) -> None:
    """Raise TelemetryConfigError for the first setting out of its range."""
    for name, low, high in (
        ("history_days", 0.001, 36_500),
        ("history_bytes_max", 2**20, math.inf),
        ("history_segment_s", 0.05, 86_400),
        ("incident_s", 1, 86_400),
        ("incident_pause_s", 1, 86_400),
        ("incidents_max", 1, 10_000),
        ("incidents_bytes_max", 2**20, math.inf),
        ("slo_burn_share", 0.001, 1),
        ("slo_burn_requests", 1, 100_000),
        ("ring_records", 1, math.inf),
        ("stream_readers_max", 1, math.inf),
        ("sql_rows_max", 1, math.inf),
        ("sql_deadline_s", 0.01, math.inf),
        ("otlp_interval_s", 0.1, 3600),
    ):
        value = getattr(config, name)
        if not low <= value <= high:  # a NaN fails this comparison too
            flag = "--" + name.replace("_", "-")
            bounds = f"at least {low}" + (f" and at most {high}" if high < math.inf else "")
            raise TelemetryConfigError(f"{flag} must be {bounds}, not {value}")
    if config.otlp_endpoint is not None:
        parts = urlsplit(config.otlp_endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = config.otlp_endpoint
            raise TelemetryConfigError(f"--otlp-endpoint must be an http or https URL, not {shown}")
