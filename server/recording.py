"""What the flight recorder is told of this server: its clock, its engine, its objectives.

Owns the wiring of telemetry/recorder.py into a server; server/life.py calls `build_recorder` once.
A Fault of the recorder is published on the event loop, as every record is. Decides nothing itself.
"""

import asyncio
from collections.abc import Callable

from server.clock import Clock
from server.config import ServerConfig
from telemetry.alarms import Rules
from telemetry.bus import Bus
from telemetry.history import History
from telemetry.recorder import Recorder, Watched
from telemetry.records import Fault

PUBLISH_S = 1.0


def build_recorder(
    config: ServerConfig,
    *,
    bus: Bus,
    history: History,
    clock: Clock,
    stalled_s: Callable[[], float],
) -> Recorder:
    """Return the recorder of a server, not started. Needs a running event loop.

    `stalled_s` tells for how long the engine has had work and made no progress.
    """
    loop = asyncio.get_running_loop()

    async def publish_here(fault: Fault) -> None:
        bus.publish(fault)

    def publish(fault: Fault) -> None:
        asyncio.run_coroutine_threadsafe(publish_here(fault), loop).result(PUBLISH_S)

    return Recorder(
        bus=bus,
        history=history,
        config=config.telemetry,
        rules=rules_of(config),
        watched=Watched(now_ns=clock.now_ns, stalled_s=stalled_s, publish=publish),
    )


def rules_of(config: ServerConfig) -> Rules:
    """Return when this server raises an alarm.

    Where the policy does not plan by objectives, only requests that came with one are judged.
    """
    engine = config.engine
    return Rules(
        ttft_ms=engine.ttft_ms,
        tpot_ms=engine.tpot_ms,
        judge_all=engine.scheduling_policy == "slo",
        burn_share=config.telemetry.slo_burn_share,
        burn_requests=config.telemetry.slo_burn_requests,
        stall_s=config.engine_stall_s,
        pause_s=config.telemetry.incident_pause_s,
    )
