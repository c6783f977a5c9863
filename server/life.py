"""The life of a server: put together, started, drained and ended in order.

Owns start and stop of every part and the reaction to signals; server/cli.py calls `serve` once.
The first signal stops admission and lets running requests finish, a second one ends them. Must
leave nothing half written: the engine ends before history does, history before the process.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import NoReturn, cast

import uvicorn

from engine.config import EngineConfig
from engine.kept_folder import KeptFolderError, open_folder
from server.app import build_app
from server.clock import Clock
from server.comparisons import Comparisons
from server.config import ServerConfig, cache_folder, shown
from server.connections import Connections, enough_descriptors
from server.context import Context
from server.engine_client import EngineClient, EngineFailed, Identity
from server.errors import engine_down
from server.explainer import Explainer
from server.gate import checks_of
from server.generation import Generations, Parts
from server.keys import KEY_CHARS_ADVISED, KeyRing
from server.log import facts
from server.metering import Metered, Refusals, build_metrics
from server.origins import is_loopback
from server.prompts import Prompts
from server.queue import Queue, limits_of
from server.recording import build_recorder
from server.served_model import Model
from server.telemetry_stream import LABEL as STREAM_LABEL
from server.traffic import Traffic
from server.watchdog import Watchdog
from telemetry.bus import Bus
from telemetry.case_files import CaseFiles
from telemetry.history import History
from telemetry.records import CancelCause

SEND_BUFFER_BYTES = 128 * 1024
ENGINE_S = 5.0
KEEPALIVE_S = 30
CUT_S = 2.0
"""How long ended streams get to write their last event."""
LAST_WORDS_S = 0.3
"""How long a page gets to read the ends of the last requests: some periods of its stream."""


class StartError(Exception):
    """The server cannot start: one line for the operator."""


class Web(uvicorn.Server):
    """uvicorn without its signal handlers: who stops, and when, is decided in `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket bound to the address, so that a taken port shows before the model loads."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit both. A bounded buffer lets a client that reads nothing be
        # noticed after so many bytes, not after the kernel's megabytes. The kernel's own cut comes
        # later: it closes the connection, which our watch over the requests cannot.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        cut_ms = int(4000 * config.client_stall_s)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, cut_ms)
        # A client whose machine is gone says nothing more: ask, while we only wait for it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        listening.bind((config.host, config.port))
        listening.listen()  # at once: two sockets may be bound to a port, but only one listens
    except OSError as error:
        listening.close()
        place = f"{config.host}:{config.port}"
        raise StartError(f"cannot listen on {place}: {error.strerror or error}") from error
    return listening


def _case_files(config: ServerConfig, history: History) -> CaseFiles:
    return CaseFiles(
        lambda: history.status().folder,
        rows_max=config.telemetry.sql_rows_max,
        deadline_s=config.telemetry.sql_deadline_s,
    )


def _packed_cache(config: ServerConfig) -> str:
    return config.engine.packed_cache or str(cache_folder() / "packed")


def _engine_config(config: ServerConfig, model: Model) -> EngineConfig:
    return replace(config.engine, model=model.spec.path, packed_cache=_packed_cache(config))


def build_context(config: ServerConfig, model: Model, keys: KeyRing | None) -> Context:
    """Return the parts of a server, put together and not started. Needs a running event loop."""
    clock = Clock.start()
    queue = Queue(limits_of(config), clock.now_ns)
    run_id = time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(3)
    bus = Bus(run_id=run_id, capacity=config.telemetry.ring_records)
    engine = EngineClient(
        config=_engine_config(config, model),
        identity=Identity(replica=config.replica, model=model.names[0]),
        bus=bus,
        clock=clock,
        spec=model.spec,
        queue=queue,
    )
    history = History(bus=bus, config=config.telemetry)
    case_files = _case_files(config, history)
    explainer = Explainer(bus=bus, clock=clock)
    watchdog = Watchdog(engine, hang_s=config.engine_hang_s)
    metered = Metered(clock, engine, history, watchdog, Refusals())
    prompts = Prompts(model.tokenizer) if config.show_prompts else None
    parts = Parts(
        queue_deadline_s=config.queue_deadline_s,
        prompts=prompts,
        engine=engine,
        tokenizer=model.tokenizer,
        bus=bus,
        clock=clock,
        explainer=explainer,
        eos_ids=frozenset(model.spec.eos_ids),
    )
    return Context(
        config=config,
        clock=clock,
        bus=bus,
        history=history,
        metrics=build_metrics(config, bus, metered),
        refusals=metered.refusals,
        recorder=build_recorder(
            config,
            bus=bus,
            history=history,
            clock=clock,
            stalled_s=lambda: watchdog.stalled_s if engine.state == "ready" else 0.0,
        ),
        case_files=case_files,
        comparisons=Comparisons(history, case_files, now_unix_us=lambda: _now_unix_us(bus, clock)),
        explainer=explainer,
        spec=model.spec,
        engine=engine,
        watchdog=watchdog,
        tokenizer=model.tokenizer,
        template=model.template,
        template_fault=model.template_fault,
        generations=Generations(parts),
        prompts=prompts,
        traffic=Traffic(),
        checks=checks_of(config, keys, queue),
        model_names=model.names,
    )


def _now_unix_us(bus: Bus, clock: Clock) -> int:
    """Return the present as the record has it: the wall clock may have stepped since the start."""
    run = bus.snapshot().run
    return time.time_ns() // 1000 if run is None else run.started_unix_us + clock.now_ns() // 1000


class Life:
    """One server from start to end, on one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        model: Model,
        listening: socket.socket,
        keys: KeyRing | None,
    ) -> None:
        self._config = config
        self._listening = listening
        self._log = logging.getLogger("iterscope")
        self._context = build_context(config, model, keys)
        self._connections = Connections(config)
        self._web = Web(
            uvicorn.Config(
                build_app(self._context),
                http=cast("type[asyncio.Protocol]", self._connections.protocol),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=cast("int", config.keep_alive_s),
                timeout_graceful_shutdown=int(2 * CUT_S),
            )
        )
        self._signals = 0
        self._signalled = asyncio.Condition()

    async def run(self) -> None:
        """Serve until a signal; raises StartError when the engine cannot start."""
        context = self._context
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        web = asyncio.create_task(self._web.serve(sockets=[self._listening]))
        sweeping = asyncio.create_task(self._connections.watch())
        context.history.start()
        context.metrics.start()
        context.recorder.start()
        context.explainer.start()
        try:
            await context.engine.start()
            watching = asyncio.create_task(context.watchdog.run())
            stopped = asyncio.create_task(self._after_signals(1))
            served = asyncio.create_task(self._serve())
            endless = (served, watching, sweeping)
            await asyncio.wait((web, stopped, *endless), return_when=asyncio.FIRST_COMPLETED)
            for task in endless:
                if task.done():
                    task.result()
            served.cancel()
            watching.cancel()
            if web.done() and not self._signals:
                raise RuntimeError("the web server ended by itself")
            await self._drain()
        finally:
            await self._end(web)
            sweeping.cancel()

    def url(self) -> str:
        """Return where the server listens."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # ---- start

    async def _serve(self) -> None:
        """Tell of the start and of the end of the loading; then wait for ever."""
        context = self._context
        self._log.info("Iterscope %s, listening on %s", version("iterscope"), self.url())
        self._log.info("settings: %s", facts(shown(self._config)))
        self._warn()
        if context.template is None:
            self._log.warning("no chat template (%s): completions only", context.template_fault)
        try:
            await context.engine.wait_settled()
        except EngineFailed as error:
            raise StartError(str(error)) from error
        run = context.engine.run
        assert run is not None
        asked = self._config.engine.max_model_len
        if asked is not None and asked > run.model_len_max:
            self._log.warning(
                "--max-model-len %d is more than the model and the KV cache hold: %d is in force",
                asked,
                run.model_len_max,
            )
        context.history.announce(self.url())
        if self._config.telemetry.history is not None:
            context.history.queries.start()
        # What the start has made stays for good: the collector need not walk it while tokens wait.
        gc.collect()
        gc.freeze()
        self._log.info("engine: %s", run.config)
        self._log.info(
            "ready in %.1f s: %s", context.clock.now_ns() / 1e9, f"{self.url()}/dashboard/"
        )
        await asyncio.Event().wait()

    def _warn(self) -> None:
        """Say what an operator should know of how open this server is."""
        config = self._config
        if self._context.checks.keys is None and not is_loopback(config.host):
            self._log.warning("no --api-key: whoever reaches %s may use this server", self.url())
        if any(len(key) < KEY_CHARS_ADVISED for key in config.api_key):
            self._log.warning("an --api-key is shorter than %d characters", KEY_CHARS_ADVISED)
        if config.show_prompts:
            self._log.warning("--show-prompts: what clients ask goes into this log")
        if config.engine.packed_cache_bytes:
            try:
                open_folder(kept := _packed_cache(config))
            except KeptFolderError as error:
                self._log.warning("--packed-cache %s %s: no packed weights are kept", kept, error)
        if fewer := enough_descriptors(config.max_connections):
            self._log.warning("this process may open %d files: fewer connections than asked", fewer)

    # ---- stop

    def _on_signal(self) -> None:
        self._signals += 1
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._signalled:
            self._signalled.notify_all()

    async def _after_signals(self, count: int) -> None:
        async with self._signalled:
            await self._signalled.wait_for(lambda: self._signals >= count)

    async def _drain(self) -> None:
        """Refuse new requests, let running ones finish for drain_s, then end them."""
        generations = self._context.generations
        generations.admitting = False
        if not generations.live():
            return
        self._log.info(
            "stopping: %d requests get %g s to finish",
            len(generations.live()),
            self._config.drain_s,
        )
        idle = asyncio.create_task(generations.idle())
        hurried = asyncio.create_task(self._after_signals(2))
        await asyncio.wait(
            (idle, hurried), timeout=self._config.drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        cause: CancelCause = "shutdown" if hurried.done() else "drain"
        hurried.cancel()
        generations.cancel_all(cause, engine_down("the server is shutting down", retry_after_s=5))
        await asyncio.wait((idle,), timeout=CUT_S)
        idle.cancel()

    async def _end(self, web: "asyncio.Task[None]") -> None:
        context = self._context
        context.generations.admitting = False
        self._connections.cut_unfinished()
        if context.bus.readers().get(STREAM_LABEL):
            await asyncio.sleep(LAST_WORDS_S)
        # The method and not the flag: the library of the telemetry stream hooks into it, and
        # would otherwise keep its streams open until uvicorn loses patience.
        self._web.handle_exit(signal.SIGTERM, None)
        await asyncio.wait((web,), timeout=CUT_S)
        # Who still reads nothing is cut: uvicorn would cancel its task, and print a trace of it.
        self._connections.abort()
        await asyncio.wait((web,), timeout=2 * CUT_S)
        # An engine that still loads reads no command: it is not waited for.
        await context.engine.stop(ENGINE_S if context.engine.state == "ready" else 0.0)
        await context.explainer.stop()
        await asyncio.to_thread(context.recorder.stop)
        await asyncio.to_thread(context.case_files.close)
        await asyncio.to_thread(context.history.close)
        await asyncio.to_thread(context.metrics.stop)
        context.tokenizer.close()
        if context.template is not None:
            context.template.close()
        self._listening.close()
        self._log.info("stopped")


async def serve(
    config: ServerConfig, model: Model, listening: socket.socket, keys: KeyRing | None
) -> None:
    """Run one server until it is told to stop; raises StartError."""
    await Life(config, model, listening, keys).run()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal end the program with code 0 until a server has its own way to stop."""

    def stop(*_: object) -> NoReturn:
        raise SystemExit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
