"""The command line: `iterscope serve` and `iterscope sql`.

Owns the parsing of arguments, exit codes and what is printed when a start fails: one line, never a
trace. The engine's process imports this module too (multiprocessing's way of naming the program),
so at import it must stay light and do nothing; what a command needs is imported when it runs.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import version

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


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 (it failed while running) or 2 (misuse, cannot start)."""
    flags = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = flags.run
    try:
        return run(flags)
    except (ConfigError, SpecError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; `run` of the parsed flags is what to call with them."""
    from server.diff_command import add_diff_flags, run_diff_command  # noqa: PLC0415
    from server.doctor_command import add_doctor_flags, run_doctor_command  # noqa: PLC0415
    from server.explain_command import add_explain_flags, run_explain_command  # noqa: PLC0415
    from server.export_command import add_export_flags, run_export_command  # noqa: PLC0415
    from server.history_command import add_history_flags, run_history_command  # noqa: PLC0415
    from server.lint_command import add_lint_flags, run_lint_command  # noqa: PLC0415
    from server.record_command import add_record_flags, run_record_command  # noqa: PLC0415
    from server.sql_command import add_sql_flags, run_sql_command  # noqa: PLC0415

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
    sql = commands.add_parser("sql", help="ask the history one SELECT")
    add_sql_flags(sql)
    sql.set_defaults(run=run_sql_command)
    explain = commands.add_parser("explain", help="say where every millisecond of a request went")
    add_explain_flags(explain)
    explain.set_defaults(run=run_explain_command)
    lint = commands.add_parser("lint", help="find what is wrong; exit code 1 if anything is")
    add_lint_flags(lint)
    lint.set_defaults(run=run_lint_command)
    record = commands.add_parser("record", help="copy a range of the record into one file")
    add_record_flags(record)
    record.set_defaults(run=run_record_command)
    export = commands.add_parser("export", help="write a range of the record as a Perfetto trace")
    add_export_flags(export)
    export.set_defaults(run=run_export_command)
    diff = commands.add_parser("diff", help="compare two runs, windows or files")
    add_diff_flags(diff)
    diff.set_defaults(run=run_diff_command)
    history = commands.add_parser("history", help="what a history holds; its way into Parquet")
    add_history_flags(history)
    history.set_defaults(run=run_history_command)
    doctor = commands.add_parser("doctor", help="what is here, what auto chooses, what is wrong")
    add_doctor_flags(doctor)
    doctor.set_defaults(run=run_doctor_command)
    return parser


def _refuse(line: str) -> int:
    print(f"iterscope: {line}", file=sys.stderr)
    return 2


def _serve(flags: argparse.Namespace) -> int:
    import uvloop  # noqa: PLC0415

    from server.demo import DemoError  # noqa: PLC0415
    from server.keys import read_keys  # noqa: PLC0415
    from server.life import StartError, listen, serve, stoppable  # noqa: PLC0415
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
            run.run(serve(config, load_model(config), listening, keys))
    except (StartError, DemoError) as error:
        return _refuse(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
