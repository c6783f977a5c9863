"""What metrics are told of this server: its clock, its engine, its history, its objective.

Owns the wiring of telemetry/metrics.py into a server, and the count of requests that were refused
as they stood; server/life.py calls `build_metrics` once, server/app.py counts. Decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from engine.config import ConfigError
from server.clock import Clock
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.watchdog import Watchdog
from telemetry.bus import Bus
from telemetry.gpus import Gpus
from telemetry.history import History
from telemetry.metrics import Exporter, Metrics, Outside, Told
from telemetry.objective import due_ms

EXTRA_MODULE = "opentelemetry"
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
OTHERS = frozenset({401, 403, 405, 429, 499})
"""Refusals of a client error's status that say nothing of the request, or are counted elsewhere."""


class Refusals:
    """Requests to generate that were refused as they stood, before anything was done for them."""

    def __init__(self) -> None:
        self.invalid = 0

    def see(self, path: str, status: int) -> None:
        """Count an answer that is an error."""
        if path in GENERATING and 400 <= status < 500 and status not in OTHERS:
            self.invalid += 1


@dataclass(frozen=True, slots=True)
class Metered:
    """The parts of a server that know figures which are not in the record."""

    clock: Clock
    engine: EngineClient
    history: History
    watchdog: Watchdog
    refusals: Refusals


def build_metrics(config: ServerConfig, bus: Bus, metered: Metered) -> Metrics:
    """Return the metrics of a server, not started."""

    def tell() -> Mapping[str, Told]:
        history = metered.history.status()
        return {
            "iterscope_start_time_seconds": metered.clock.started_unix_us / 1e6,
            "iterscope_engine_up": metered.engine.state == "ready",
            "iterscope_engine_stalled_seconds": metered.watchdog.stalled_s,
            "iterscope_requests_invalid_total": metered.refusals.invalid,
            "iterscope_history_degraded": history.degraded,
            "iterscope_history_bytes": history.bytes,
            "iterscope_history_rows": history.rows,
            "iterscope_history_segments": history.segments,
            "iterscope_history_lag_seconds": history.behind_s,
            "iterscope_history_rotation_age_seconds": history.lag_s,
            "iterscope_history_lost_total": history.lost,
        }

    return Metrics(
        bus=bus,
        model_name=metered.engine.identity.model,
        vllm_aliases=config.telemetry.vllm_aliases,
        objective=due_ms(ttft_ms=config.engine.ttft_ms, tpot_ms=config.engine.tpot_ms),
        outside=Outside(
            now_ns=metered.clock.now_ns,
            tell=tell,
            exporter=_exporter(config, metered.engine),
            gpus=Gpus(),
        ),
    )


def check_extra(config: ServerConfig) -> None:
    """Raise ConfigError when what a setting needs is not installed."""
    if config.telemetry.otlp_endpoint is not None and find_spec(EXTRA_MODULE) is None:
        raise ConfigError("--otlp-endpoint needs the extra: pip install 'iterscope[otel]'")


def _exporter(config: ServerConfig, engine: EngineClient) -> Exporter | None:
    endpoint = config.telemetry.otlp_endpoint
    if endpoint is None:
        return None
    from telemetry.otlp import Otlp  # noqa: PLC0415

    return Otlp(
        endpoint,
        interval_s=config.telemetry.otlp_interval_s,
        attributes={
            "gen_ai.provider.name": "iterscope",
            "gen_ai.request.model": engine.identity.model,
            "gen_ai.response.model": engine.identity.model,
            "server.address": config.host,
            "server.port": config.port,
        },
        replica=config.replica,
    )
