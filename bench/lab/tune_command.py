"""`iterscope tune`: search max_num_seqs, token budget and chunk cap by measured runs.

Owns its flags, how its time is cut into runs, and its exit codes: 0 done, 1 it failed, 2 misuse,
130 cut short, with what had run by then. server/cli.py calls it; tune_runs.py starts the servers,
tune.py searches, tune_told.py says what was found. Must never change a server that it did not
start.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.lab import workload
from bench.lab.lab_command import slo_of
from bench.lab.make import SOURCES, Recipe
from bench.lab.prompts import IDS_BELOW
from bench.lab.serving import PROGRAM, ServerFailed, check_flags
from bench.lab.tune import Found, Setting, is_possible, search
from bench.lab.tune_runs import CUT_OFF_S, START_S, WARM_S, Tuning, ground_of
from bench.lab.tune_told import show, told
from bench.lab.workload import Workload, WorkloadError
from bench.machine import StolenTime, describe
from engine.config import EngineConfig

DONE, WRONG, MISUSE, INTERRUPTED = 0, 1, 2, 130
RUNS_WIDE, RUNS_NARROW = 30, 21
"""Runs that a search of eight or of four other settings takes, with its rate and its proof."""
SEARCHED = ("--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-tokens", "--model")
LEAST_S, WIDE_S = 4.0, 8.0
"""A wide search needs so many seconds a run: fewer requests would say nothing."""


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope tune`."""
    engine = EngineConfig()
    parser.add_argument(
        "--slo", required=True, metavar="ttft=MS,tpot=MS", help="when tokens are due"
    )
    parser.add_argument("--model", default="demo", help="model file, folder, or demo")
    parser.add_argument(
        "--workload",
        default="azure-conv",
        metavar="FILE",
        help=f"that `iterscope lab workload` wrote, or one of {', '.join(SOURCES)}",
    )
    parser.add_argument("--rate", type=float, help="requests a second; found if it is not given")
    parser.add_argument("--context", type=int, default=512, help="tokens that lengths must fit")
    parser.add_argument("--ids-below", type=int, default=IDS_BELOW, help="of token ids")
    parser.add_argument("--minutes", type=float, default=10.0, help="what the search may take")
    parser.add_argument(
        "--flags",
        default="",
        metavar="'--dtype f32 ...'",
        help="server flags of every setting; one alone as --flags=--nvtx",
    )
    parser.add_argument("--max-num-seqs", type=int, default=engine.max_num_seqs, help="to begin at")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=engine.max_num_batched_tokens,
        help="to begin at",
    )
    parser.add_argument("--long-prefill-tokens", type=int, help="to begin at")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run_tune_command(flags: argparse.Namespace) -> int:
    """Search, and say what was found."""
    console = Console(stderr=True, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="iterscope-tune-") as folder:
            found = tune(
                flags, Path(folder), lambda line: console.print(line, markup=False, soft_wrap=True)
            )
    except (WorkloadError, ValueError) as error:
        print(f"iterscope: tune: {error}", file=sys.stderr)
        return MISUSE
    except (ServerFailed, OSError) as error:
        print(f"iterscope: tune: {error}", file=sys.stderr)
        return WRONG
    if flags.json:
        print(json.dumps(found, indent=1))
    else:
        width = None if sys.stdout.isatty() else 120
        show(found, Console(highlight=False, width=width))
    return INTERRUPTED if found["stopped"] else DONE


def tune(
    flags: argparse.Namespace,
    folder: Path,
    says: Callable[[str], None],
    program: tuple[str, ...] = PROGRAM,
) -> dict[str, Any]:
    """Return what the search found; raises ValueError, WorkloadError, ServerFailed."""
    base, slo, began = _base(flags), slo_of(flags.slo, "--slo"), time.monotonic()
    if not 0.02 <= flags.minutes <= 24 * 60:
        raise ValueError("--minutes must lie within 0.02 and 1440")
    if flags.rate is not None and not 0 < flags.rate < 1e5:
        raise ValueError("--rate must be above 0")
    check_flags(shlex.split(flags.flags), "--flags", also=SEARCHED)
    fixed = _fixed(flags)
    seconds, others = _cut(flags.minutes * 60, START_S)
    tuning = Tuning(
        folder=folder,
        shared=("--model", flags.model, *shlex.split(flags.flags)),
        recipe=_recipe(flags),
        slo=slo,
        seed=flags.seed,
        deadline=began + flags.minutes * 60,
        seconds=fixed.seconds if fixed else seconds,
        says=says,
        fixed=fixed,
        rate=(fixed.rate or 0.0) if fixed else flags.rate or 0.0,
        program=program,
    )
    with StolenTime() as stolen:
        if fixed is None and flags.rate is None:
            tuning.guess_rate(base)
            left_s = tuning.deadline - time.monotonic()
            tuning.seconds, others = _cut(left_s, tuning.start_s)
            tuning.find_rate(base)
        found = search(
            Found(base, slo), tuning.trial, tuning.has_time, most=others, seed=flags.seed
        )
    ground = {
        "command": shlex.join(["iterscope", *sys.argv[1:]]),
        "minutes": flags.minutes,
        "model": flags.model,
        "workload": flags.workload,
    }
    return told(found, ground | ground_of(tuning) | describe(stolen))


def _cut(whole_s: float, start_s: float) -> tuple[float, int]:
    """Return how long a run sends, and how many other settings are tried."""
    beyond_s = CUT_OFF_S + WARM_S + start_s
    wide_s = whole_s / RUNS_WIDE - beyond_s
    if wide_s >= WIDE_S:
        return wide_s, 8
    return max(LEAST_S, whole_s / RUNS_NARROW - beyond_s), 4


def _base(flags: argparse.Namespace) -> Setting:
    base = Setting(flags.max_num_seqs, flags.max_num_batched_tokens, flags.long_prefill_tokens)
    if not is_possible(base):
        raise ValueError(f"--max-num-seqs, --max-num-batched-tokens: {base} cannot be served")
    return base


def _recipe(flags: argparse.Namespace) -> Recipe:
    if flags.context < 16 or flags.ids_below < 16:
        raise ValueError("--context and --ids-below must be at least 16")
    source = {} if _is_file(flags) else {"source": flags.workload}
    return Recipe(**source, context_tokens=flags.context, ids_below=flags.ids_below)


def _fixed(flags: argparse.Namespace) -> Workload | None:
    """Return the workload of a file, None where a source is named; raises WorkloadError."""
    if not _is_file(flags):
        return None
    if flags.rate is not None:
        raise ValueError("--rate: a workload's file has its own")
    return workload.read(Path(flags.workload).expanduser())


def _is_file(flags: argparse.Namespace) -> bool:
    return flags.workload not in SOURCES and not flags.workload.startswith("recorded:")
