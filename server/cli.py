"""The command line: `iterscope serve` and `iterscope sql`.

Owns the parsing of arguments, exit codes and what is printed when a start fails: one line, never a
trace. The engine's process imports this module too (multiprocessing's way of naming the program),
so at import it must stay light and do nothing; what a command needs is imported when it runs.
"""

import argparse
import asyncio
import sys
from importlib.metadata import version

from engine.config import ConfigError
from engine.spec import SpecError
from server.config import Parser, ServerConfig, add_serve_flags, from_flags, quiet_threads
from server.log import configure


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (it failed while running) or 2 (misuse, cannot start)."""
    flags = build_parser().parse_args(arguments)
    try:
        return _serve(from_flags(flags)) if flags.command == "serve" else _sql(flags)
    except (ConfigError, SpecError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser("iterscope", description="Continuous batching you can see.")
    parser.add_argument("--version", action="version", version=f"iterscope {version('iterscope')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve_flags(commands.add_parser("serve", help="serve a model over HTTP"))
    return parser


def _refuse(line: str) -> int:
    print(f"iterscope: {line}", file=sys.stderr)
    return 2


def _serve(config: ServerConfig) -> int:
    import uvloop  # noqa: PLC0415

    from server.demo import DemoError  # noqa: PLC0415
    from server.life import StartError, listen, load_model, serve  # noqa: PLC0415

    quiet_threads()
    configure(config.log_level)
    try:
        with listen(config) as listening, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
            run.run(serve(config, load_model(config), listening))
    except (StartError, DemoError) as error:
        return _refuse(str(error))
    return 0


def _sql(flags: argparse.Namespace) -> int:
    return 0


if __name__ == "__main__":
    sys.exit(main())
