"""What operators and their programs ask: is it alive, is it ready, which version, what figures.

Owns the handlers of /health, /ready, /version and /metrics; server/app.py puts them in its table.
Health tells the truth about progress: an engine that is gone, or has work and takes no step, is
not healthy. Must answer at once, whatever the engine does.
"""

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.context import Context, context_of
from server.openai_api import answer
from telemetry.records import SCHEMA_VERSION


def state_of(context: Context) -> str:
    """Return ok, loading, restarting, stalled or down."""
    engine = context.engine
    if engine.state == "loading":
        return "restarting" if engine.run else "loading"
    if engine.state == "ready" and context.watchdog.stalled_s >= context.config.engine_stall_s:
        return "stalled"
    return "ok" if engine.state == "ready" else "down"


async def health(request: Request) -> Response:
    """Answer GET /health: 200 while the engine serves and makes progress, else 503."""
    context = context_of(request)
    state = state_of(context)
    progress = context.engine.progress if state in ("loading", "restarting") else None
    history = context.history.status()
    body: dict[str, object] = {
        "status": state,
        "loading": {"stage": progress.stage, "fraction": progress.fraction} if progress else None,
        "draining": not context.generations.admitting,
        "requests": len(context.generations.live()),
        "history": {
            "kept": history.kept,
            "degraded": history.degraded,
            "reason": history.reason,
            "lost": history.lost,
            "bytes": history.bytes,
            "segments": history.segments,
        },
    }
    return _with_status(body, 200 if state == "ok" else 503)


async def ready(request: Request) -> Response:
    """Answer GET /ready: 200 when a request sent now would be taken, with or without history."""
    context = context_of(request)
    state = state_of(context)
    if not context.generations.admitting:
        state = "draining"
    history = context.history.status()
    body: dict[str, object] = {
        "status": state,
        "history": "degraded" if history.degraded else "kept" if history.kept else "off",
    }
    return _with_status(body, 200 if state == "ok" else 503)


def _with_status(body: dict[str, object], status: int) -> Response:
    response = answer(body, {"cache-control": "no-store"})
    response.status_code = status
    return response


async def product_version(request: Request) -> Response:
    """Answer GET /version."""
    context = context_of(request)
    return answer(
        {
            "version": version("iterscope"),
            "schema_version": SCHEMA_VERSION,
            "run_id": context.bus.run_id,
        }
    )


async def metrics(request: Request) -> Response:
    """Answer GET /metrics: Prometheus' plain text, or OpenMetrics where it is asked for."""
    context = context_of(request)
    body, content_type = context.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


ROUTES = (
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/version", product_version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
)
