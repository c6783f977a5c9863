"""The server's configuration: what an operator may ask, from the command line and the environment.

Owns ServerConfig (which holds the engine's and telemetry's own), the flags made from their fields,
the default folders and the only reading of the environment. server/cli.py calls it at start,
engine processes inherit what `quiet_threads` has set. Must never open, create or probe anything.
"""

import argparse
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from engine.config import ConfigError, EngineConfig, check_engine, flag_name, setting
from telemetry.config import TelemetryConfig, TelemetryConfigError
from telemetry.config import check as check_telemetry

ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:\d+)?|https?://\[[0-9a-f:]+\](:\d+)?")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

QUIET: Mapping[str, str] = types.MappingProxyType(
    {
        # Threads that spin at an OpenMP barrier turn every other runnable thread into a lost time
        # slice, and this server's own event loop is such a thread.
        "OMP_WAIT_POLICY": "PASSIVE",
        # The tokenizer encodes one text at a time: a pool of threads would only compete.
        "TOKENIZERS_PARALLELISM": "false",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of one server; the engine's and telemetry's stand in their own classes."""

    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0 takes a free one", 8000)
    served_model_name: str | None = setting(
        "name clients ask for; the model's own by default", None
    )
    api_key: tuple[str, ...] = setting(
        "key that requests must carry; may be given again (or ITERSCOPE_API_KEY)", ()
    )
    api_keys_file: str | None = setting("TOML file of keys, each with a name and a tenant", None)
    allowed_hosts: str = setting("more names clients may call this server by, comma separated", "")
    allowed_origins: str = setting(
        "origins whose pages may use the API, comma separated; * for any", ""
    )
    replica: str = setting("name of this server among its replicas", "iterscope")
    show_prompts: bool = setting("write prompts into the log, and show them on the page", False)
    try_it: bool | None = setting(
        "let the page send prompts; by default on this machine's own address alone", None
    )
    log_level: str = setting("least severe log line to print", "info", LOG_LEVELS)
    log_format: str = setting("how log lines look", "text", LOG_FORMATS)
    body_bytes_max: int = setting("most bytes of a request body", 8 * 2**20)
    file_bytes_max: int = setting("most bytes of a recorded file sent to be seen", 512 * 2**20)
    sequences_max: int = setting("most sequences (prompts x n) of one HTTP request", 512)
    max_queue_requests: int = setting("most sequences waiting beyond the free slots", 1024)
    max_queue_tokens: int = setting("most prompt tokens waiting", 4 * 2**20)
    max_tenant_requests: int | None = setting("most sequences of one tenant waiting", None)
    max_tenant_tokens: int | None = setting("most prompt tokens of one tenant waiting", None)
    max_inflight_bytes: int = setting("most bytes of request bodies held at once", 256 * 2**20)
    max_connections: int = setting("most connections open at once", 4096)
    max_connections_per_address: int = setting("most of them from one address", 2048)
    keep_alive_s: float = setting("seconds a connection may stay open between requests", 30.0)
    header_bytes_max: int = setting("most bytes of a request's head", 32 * 1024)
    header_deadline_s: float = setting("seconds a request's head may take to arrive", 10.0)
    body_deadline_s: float = setting("seconds a body may take, and pause, without its rate", 20.0)
    body_bytes_per_s_min: int = setting("bytes of a body that earn it one second more", 8192)
    queue_deadline_s: float | None = setting("seconds a request may wait to be admitted", None)
    client_stall_s: float = setting("seconds a client may read nothing before it is cut", 30.0)
    engine_stall_s: float = setting("seconds without progress, with work, until health fails", 15.0)
    engine_hang_s: float = setting("seconds without progress, with work, until a restart", 60.0)
    drain_s: float = setting("seconds running requests get to finish at shutdown", 10.0)
    engine: EngineConfig = field(default_factory=EngineConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


class Parser(argparse.ArgumentParser):
    """An argument parser whose error is one line; argparse's own prints every flag first."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser one flag for each setting; a flag left out leaves no attribute."""
    for kind in (ServerConfig, EngineConfig, TelemetryConfig):
        group = parser.add_argument_group(kind.__name__.removesuffix("Config").lower())
        hints = get_type_hints(kind)
        for item in fields(kind):
            if item.name in ("engine", "telemetry"):
                continue
            _add_flag(group, item.name, hints[item.name], item.metadata, item.default)
            if item.name == "history":
                group.add_argument(
                    "--no-history",
                    dest="history",
                    action="store_const",
                    const=None,
                    default=argparse.SUPPRESS,
                    help="keep no history",
                )


def _add_flag(
    group: Any, name: str, hint: object, metadata: Mapping[str, Any], default: object
) -> None:
    kind = hint
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(hint) if part is not type(None))
    shown = default_history() if name == "history" else default
    help_text = metadata["help"].replace("%", "%%")
    if shown not in (None, "", ()):
        help_text += f" (default: {shown})"
    options: dict[str, Any] = {"dest": name, "help": help_text, "default": argparse.SUPPRESS}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is tuple:
        options["action"] = "append"
    else:
        auto = metadata.get("auto")
        options["type"] = kind if auto is None else _number_or_auto(auto)
        options["choices"] = metadata["choices"] or None
    group.add_argument(flag_name(name), **options)


def _number_or_auto(auto: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        return auto if text == "auto" else int(text)

    read.__name__ = "number"  # argparse says so of a text that is none
    return read


def from_flags(
    flags: argparse.Namespace, settings: Mapping[str, Any] = types.MappingProxyType({})
) -> ServerConfig:
    """Return the checked configuration that the parsed flags ask for; raises ConfigError.

    settings, by their fields' names, hold where no flag was given.
    """
    given = {**settings, **vars(flags)}

    def of(kind: type) -> dict[str, Any]:
        found = {item.name: given[item.name] for item in fields(kind) if item.name in given}
        return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}

    telemetry = {"history": str(default_history())} | of(TelemetryConfig)
    key = default_api_key()
    server = {"api_key": (key,) if key else ()} | of(ServerConfig)
    config = ServerConfig(
        engine=EngineConfig(**of(EngineConfig)), telemetry=TelemetryConfig(**telemetry), **server
    )
    check(config)
    return config


def check(config: ServerConfig) -> None:
    """Raise ConfigError for the first setting out of its range."""
    check_engine(config.engine)
    for name, low, high in (
        ("port", 0, 65535),
        ("body_bytes_max", 1024, 2**31),
        ("file_bytes_max", 1024, 2**40),
        ("sequences_max", 1, 100_000),
        ("max_queue_requests", 0, 1_000_000),
        ("max_queue_tokens", 1, 2**40),
        ("max_tenant_requests", 1, 1_000_000),
        ("max_tenant_tokens", 1, 2**40),
        ("max_inflight_bytes", 1024, 2**50),
        ("max_connections", 1, 1_000_000),
        ("max_connections_per_address", 1, 1_000_000),
        ("keep_alive_s", 0, 86_400),
        ("header_bytes_max", 512, 2**24),
        ("header_deadline_s", 0.1, 86_400),
        ("body_deadline_s", 0.1, 86_400),
        ("body_bytes_per_s_min", 1, 2**40),
        ("queue_deadline_s", 0.01, 86_400),
        ("client_stall_s", 0.1, 86_400),
        ("engine_stall_s", 0.1, 86_400),
        ("engine_hang_s", 0.5, 86_400),
        ("drain_s", 0, 86_400),
    ):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{flag_name(name)} must lie within {low} and {high}, not {value}")
    for name, choices in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
        if getattr(config, name) not in choices:
            raise ConfigError(f"{flag_name(name)} must be one of {', '.join(choices)}")
    if "" in config.api_key:
        raise ConfigError("--api-key is empty: leave it out to serve without a key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in config.api_key):
        raise ConfigError("--api-key must be ASCII: HTTP headers carry nothing else safely")
    for origin in listed(config.allowed_origins):
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allowed-origins: {origin} is not like https://example.org:8443")
    try:
        check_telemetry(config.telemetry)
    except TelemetryConfigError as error:
        raise ConfigError(str(error)) from error


def setting_hints() -> dict[str, dict[str, object]]:
    """Return each setting's type by name, under server, engine and telemetry."""
    found = {}
    for kind in (ServerConfig, EngineConfig, TelemetryConfig):
        hints = get_type_hints(kind)
        names = [item.name for item in fields(kind) if item.name not in ("engine", "telemetry")]
        found[kind.__name__.removesuffix("Config").lower()] = {name: hints[name] for name in names}
    return found


def setting_values(config: ServerConfig) -> dict[str, dict[str, object]]:
    """Return each setting's value by name, under server, engine and telemetry; keys are hidden."""
    hidden = replace(config, api_key=("(set)",) if config.api_key else ())
    parts = {"server": hidden, "engine": config.engine, "telemetry": config.telemetry}
    return {
        table: {name: getattr(parts[table], name) for name in hints}
        for table, hints in setting_hints().items()
    }


def shown(config: ServerConfig) -> dict[str, object]:
    """Return every setting by its field's name, for people to read; the key itself is hidden."""
    tables = setting_values(config).values()
    return {name: value for table in tables for name, value in table.items()}


def default_api_key() -> str | None:
    """Return the key that the environment gives, which shows in no list of processes."""
    return os.environ.get("ITERSCOPE_API_KEY") or None


def listed(names: str) -> tuple[str, ...]:
    """Return the parts of a comma separated setting."""
    return tuple(part.strip() for part in names.split(",") if part.strip())


def cache_folder() -> Path:
    """Return the folder for what can be made or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iterscope"


def default_history() -> Path:
    """Return the folder of the history when none is asked for."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "iterscope" / "history"


def quiet_threads() -> None:
    """Ask native libraries, here and in every child, not to spin; what the user set stays."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
