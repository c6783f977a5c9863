"""The command line: `iterscope serve` and `iterscope sql`.

Owns the parsing of arguments, exit codes and what is printed when a start fails: one line, never a
trace. The engine's process imports this module too (multiprocessing's way of naming the program),
so at import it must stay light and do nothing; what a command needs is imported when it runs.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from engine.config import ConfigError
from engine.spec import SpecError
from server.config import (
    Parser,
    add_serve_flags,
    from_flags,
    quiet_threads,
    setting_hints,
    setting_values,
)
from server.config_file import as_toml, read_settings
from server.log import configure

COMMANDS = MappingProxyType(
    {
        "sql": "ask the history one SELECT",
        "explain": "say where every millisecond of a request went",
        "lint": "find what is wrong; exit code 1 if anything is",
        "record": "copy a range of the record into one file",
        "export": "write a range of the record as a Perfetto trace",
        "diff": "compare two runs, windows or files",
        "history": "what a history holds; its way into Parquet",
        "top": "watch a running server in the terminal",
        "doctor": "what is here, what auto chooses, what is wrong",
    }
)
"""Commands beside `serve`; server/NAME_command.py has add_NAME_flags and run_NAME_command."""

MEASURING = MappingProxyType(
    {
        "lab": "compare batching modes on one engine: an experiment, its load, its report",
        "tune": "search the settings that an objective allows, by measured runs",
    }
)
"""Commands that measure servers, and stand in bench/lab/ alike."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (it failed while running) or 2 (misuse, cannot start)."""
    given = sys.argv[1:] if arguments is None else arguments
    flags = build_parser(given[0] if given else None).parse_args(given)
    run: Callable[[argparse.Namespace], int] = flags.run
    try:
        return run(flags)
    except (ConfigError, SpecError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; `run` of the parsed flags is what to call with them.

    Only the chosen command is imported, and knows its flags: a server need not load what asks one.
    """
    parser = Parser("iterscope", description="Continuous batching you can see.")
    parser.add_argument("--version", action="version", version=f"iterscope {version('iterscope')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_serve_flags(serve)
    serve.add_argument("--config", metavar="FILE.toml", help="settings; flags come first")
    serve.add_argument(
        "--print-config", action="store_true", help="print the settings as TOML, and end"
    )
    serve.set_defaults(run=_serve)
    for name, meaning in {**COMMANDS, **MEASURING}.items():
        command = commands.add_parser(name, help=meaning)
        if name == chosen:
            package = "bench.lab" if name in MEASURING else "server"
            module = import_module(f"{package}.{name}_command")
            getattr(module, f"add_{name}_flags")(command)
            command.set_defaults(run=getattr(module, f"run_{name}_command"))
    return parser


def _refuse(line: str) -> int:
    print(f"iterscope: {line}", file=sys.stderr)
    return 2


def _serve(flags: argparse.Namespace) -> int:
    import uvloop  # noqa: PLC0415

    from server.demo import DemoError  # noqa: PLC0415
    from server.keys import read_keys  # noqa: PLC0415
    from server.life import StartError, listen, serve, stoppable  # noqa: PLC0415
    from server.metering import check_extra  # noqa: PLC0415
    from server.served_model import load_model  # noqa: PLC0415

    settings = read_settings(flags.config, setting_hints()) if flags.config else {}
    config = from_flags(flags, settings)
    if flags.print_config:
        print(as_toml(setting_values(config)), end="")
        return 0
    quiet_threads()
    configure(config.log_level, config.log_format, words=config.show_prompts)
    try:
        with (
            stoppable(),
            listen(config) as listening,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as run,
        ):
            keys = read_keys(config)
            check_extra(config)
            _check_history(config.telemetry.history)
            run.run(serve(config, load_model(config), listening, keys))
    except (StartError, DemoError) as error:
        return _refuse(str(error))
    return 0


def _check_history(folder: str | None) -> None:
    """Refuse to start over a folder that can never hold a history."""
    from telemetry.database import HistoryUnavailable, check_place  # noqa: PLC0415

    if folder is not None:
        try:
            check_place(Path(folder).expanduser())
        except HistoryUnavailable as error:
            raise ConfigError(f"--history: {error} (--no-history keeps none)") from error


if __name__ == "__main__":
    sys.exit(main())
