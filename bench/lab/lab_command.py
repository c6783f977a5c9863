"""`iterscope lab`: the batching experiment in one command, and its parts one by one.

Owns its flags, files and exit codes: 0 done, 1 it failed or runs are missing, 2 misuse, 130 cut
short, whatever was done then being kept and reported. server/cli.py calls it; the experiment knows
nothing of a command line. Must never delete what an earlier start has measured.
"""

import argparse
import json
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from bench.lab import generator, markdown, summary
from bench.lab.experiment import Bench, perform
from bench.lab.figures import FIGURES, SETTLE_SHARE, client_figures
from bench.lab.files import check_place, read_json, write_json
from bench.lab.make import ARRIVALS, RECORDED, SOURCES, Recipe, check_recipe, make
from bench.lab.plan import FACTORS, Plan, custom_arms, full, plan_of, quick
from bench.lab.prompts import IDS_BELOW
from bench.lab.result import collect
from bench.lab.serving import ServerFailed, check_flags
from bench.lab.workload import SECONDS_MAX, Slo, WorkloadError, check, write

DONE, WRONG, MISUSE, INTERRUPTED = 0, 1, 2, 130
PRESETS = {"quick": quick, "full": full}
LOAD_SLO = Slo(1000.0, 100.0)
TROUBLES_SHOWN = 3


def add_lab_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope lab`."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="quick|full|...")
    for name, meaning in (
        ("quick", "a small honest answer: two rates, three modes, three minutes on two cores"),
        ("full", "six rates from idle to overload; goes on where it was stopped"),
    ):
        _add_experiment(parts.add_parser(name, help=meaning))
    load = parts.add_parser("load", help="send a saved workload to any OpenAI-compatible server")
    generator.add_flags(load)
    made = parts.add_parser("workload", help="write a workload to a file")
    _add_recipe(made)
    made.add_argument(
        "--rate", type=float, help="requests a second; by default as the source has them"
    )
    made.add_argument("--concurrency", type=int, help="in flight at once, of a closed loop")
    made.add_argument("--seconds", type=float, default=30.0)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--out", type=Path, required=True, metavar="FILE")
    report = parts.add_parser("report", help="make the report of an experiment's folder anew")
    report.add_argument("out", type=Path, metavar="DIR")
    report.add_argument("--json", type=Path, help="file for the result, beside DIR's own")
    report.add_argument("--markdown", type=Path, metavar="FILE", help="the result as a page")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--arrivals", choices=ARRIVALS, help="trace: as the source has them")
    parser.add_argument("--context", type=int, help="tokens that lengths are scaled to fit")
    parser.add_argument("--tenants", type=int, help="tenants, the k-th sending as 1 / k")
    parser.add_argument("--cancelled", type=float, metavar="SHARE", help="clients that leave")
    parser.add_argument("--patience-s", type=float, help="mean patience of those")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        metavar="SHARE:ttft=MS,tpot=MS",
        help="requests with an objective of their own; may be given again",
    )
    parser.add_argument("--ids-below", type=int, default=IDS_BELOW, help="of made-up token ids")


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (iterscope-lab/NAME)")
    parser.add_argument("--json", type=Path, help="file for the result, beside DIR's own")
    parser.add_argument("--model", default="demo", help="model file, folder, or demo")
    parser.add_argument("--factor", choices=sorted(FACTORS), help="what arms differ in (modes)")
    parser.add_argument(
        "--arm", action="append", metavar="NAME=FLAGS", help="arms of your own; the first is base"
    )
    parser.add_argument("--rates", metavar="A,B,..", help="as parts of the measured capacity")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float, help="of arrivals, in each run")
    parser.add_argument("--cut-off-s", type=float, help="after them, until answers are cut off")
    parser.add_argument("--slo", metavar="ttft=MS,tpot=MS", help="objective of goodput")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument(
        "--flags",
        default="",
        metavar="'--dtype f32 ...'",
        help="server flags of every arm; one alone as --flags=--nvtx",
    )
    parser.add_argument("--quiet", action="store_true", help="print the result alone")


def run_lab_command(flags: argparse.Namespace) -> int:
    """Run one part."""
    try:
        if flags.part in PRESETS:
            return _experiment(flags)
        if flags.part == "load":
            return _load(flags)
        if flags.part == "workload":
            return _workload(flags)
        return _report(flags)
    except (WorkloadError, ValueError) as error:
        return _refuse(str(error), MISUSE)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _refuse(told, WRONG)
    except ServerFailed as error:
        return _refuse(str(error), WRONG)


def _refuse(line: str, code: int) -> int:
    print(f"iterscope: lab: {line}", file=sys.stderr)
    return code


def _experiment(flags: argparse.Namespace) -> int:
    plan = plan_from(flags)
    out = flags.out or Path("iterscope-lab") / plan.name
    if flags.json is not None:
        check_place(flags.json, "--json")
    # A source that yields nothing is told before a server starts.
    make(plan.recipe, rate=1.0, seconds=2.0, seed=plan.seed)
    bench = Bench(out=out.expanduser(), plan=plan, programs={})
    return carry_out(bench, beside=flags.json, quiet=flags.quiet)


def carry_out(bench: Bench, *, beside: Path | None = None, quiet: bool = False) -> int:
    """Do what is left of an experiment and report all that is done; return the exit code."""
    code, trouble = DONE, ""
    with _terminated_like_interrupted():
        try:
            perform(bench, quiet=quiet)
        except KeyboardInterrupt:
            code, trouble = INTERRUPTED, "stopped; the same command goes on from here"
        except ServerFailed as error:
            code, trouble = WRONG, str(error)
    done = list((bench.out / "runs").glob("*.json.gz"))
    if done:
        _write(bench, beside, shlex.join(["iterscope", *sys.argv[1:]]))
    return _refuse(trouble, code) if trouble else DONE


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end an experiment as Ctrl-C does, where signals can be taken at all."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before: Any = None
    with suppress(ValueError):  # not in the main thread
        before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def plan_from(flags: argparse.Namespace) -> Plan:
    """Return the plan that the parsed flags ask for; raises ValueError, WorkloadError."""
    plan = PRESETS[flags.part](flags.model, flags.ids_below)
    if flags.arm and flags.factor:
        raise ValueError("--arm and --factor: one of them says what arms there are")
    given: dict[str, Any] = {
        "arms": custom_arms(flags.arm) if flags.arm else FACTORS.get(flags.factor or ""),
        "fractions": _numbers(flags.rates, "--rates") if flags.rates else None,
        "repeats": flags.repeats,
        "seconds": flags.seconds,
        "cut_off_s": flags.cut_off_s,
        "slo": slo_of(flags.slo, "--slo") if flags.slo else None,
        "seed": flags.seed,
        "max_num_seqs": flags.max_num_seqs,
        "flags": tuple(shlex.split(flags.flags)),
        "recipe": _recipe(flags, plan.recipe),
    }
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    for name, low in (("repeats", 1), ("seconds", 0.5), ("cut_off_s", 0), ("max_num_seqs", 1)):
        if not low <= getattr(plan, name) <= SECONDS_MAX:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must lie within {low} and {SECONDS_MAX}")
    if len(plan.arms) < 2:
        raise ValueError("--arm: at least two are compared")
    if plan.recipe.arrivals == "closed":
        raise ValueError("--arrivals closed: has no rates to step through")
    check_recipe(plan.recipe)
    check_flags(plan.flags, "--flags", also=("--max-num-seqs",))
    for arm in plan.arms:
        check_flags(arm.flags, f"--arm {arm.name}")
    return plan


def _recipe(flags: argparse.Namespace, recipe: Recipe) -> Recipe:
    classes = None
    if flags.classes:
        parts = [text.partition(":") for text in flags.classes]
        shares = [_numbers(share, "--class")[0] for share, _, _ in parts]
        classes = tuple(
            (share, slo_of(rest, "--class"))
            for share, (_, _, rest) in zip(shares, parts, strict=True)
        )
    given = {
        "source": flags.workload,
        "arrivals": flags.arrivals,
        "context_tokens": flags.context,
        "tenants": flags.tenants,
        "cancelled_share": flags.cancelled,
        "patience_s": flags.patience_s,
        "classes": classes,
        "ids_below": flags.ids_below,
    }
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    if recipe.context_tokens < 16 or recipe.ids_below < 16:
        raise ValueError("--context and --ids-below must be at least 16")
    return recipe


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text!r} must be numbers separated by commas") from None
    # Of rates three decimals stand in the names of files.
    alike = len({f"{number:.3f}" for number in found}) < len(found)
    if not all(0.001 <= number < 1000 for number in found) or alike:
        raise ValueError(f"{flag} {text!r}: each from 0.001 to 1000 and given once")
    return tuple(sorted(found))


def slo_of(text: str, flag: str) -> Slo:
    """Return the objective that a flag tells as ttft=MS,tpot=MS; raises ValueError."""
    try:
        parts = {name: float(ms) for name, _, ms in (one.partition("=") for one in text.split(","))}
    except ValueError:
        parts = {}
    if set(parts) != {"ttft", "tpot"} or not all(0 < ms < 1e9 for ms in parts.values()):
        raise ValueError(f"{flag} {text!r} is not like ttft=1000,tpot=100")
    return Slo(parts["ttft"], parts["tpot"])


def _write(bench: Bench, beside: Path | None, command: str) -> dict[str, Any]:
    """Write result and report, print the summary, and return the result."""
    # Drawn, and loaded, only once there is something to draw.
    from bench.lab.report import write as write_report  # noqa: PLC0415

    result = collect(bench, command)
    write_json(bench.out / "result.json", result)
    if beside is not None:
        write_json(beside, result)
    write_report(result, bench.out / "report.html")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    summary.show(result, console)
    console.print(f"report: {bench.out / 'report.html'}")
    return result


def _report(flags: argparse.Namespace) -> int:
    for given, flag in ((flags.json, "--json"), (flags.markdown, "--markdown")):
        if given is not None:
            check_place(given, flag)
    path = flags.out / "plan.json"
    if not path.exists():
        return _refuse(f"{flags.out} holds no experiment", MISUSE)
    try:
        plan = plan_of(read_json(path))
    except msgspec.ValidationError as error:
        return _refuse(f"{path} is of another version: {error}", MISUSE)
    before = flags.out / "result.json"
    command = read_json(before)["settings"]["command"] if before.exists() else ""
    result = _write(Bench(out=flags.out, plan=plan, programs={}), flags.json, command)
    if flags.markdown is not None:
        markdown.write(result, flags.markdown)
    return DONE


def _load(flags: argparse.Namespace) -> int:
    _check_load(flags)
    with _terminated_like_interrupted():
        try:
            found = generator.run(flags)
        except KeyboardInterrupt:
            return _refuse("stopped before anything was sent", INTERRUPTED)
    outcomes = [ask["outcome"] for ask in found["asks"]]
    for name in sorted(set(outcomes)):
        print(f"{name:<12} {outcomes.count(name)}")
    for line in _troubles(found):
        print(f"  {line}")
    settle_ns = SETTLE_SHARE * found["seconds"] * 1e9
    counted = sum(ask["scheduled_ns"] >= settle_ns for ask in found["asks"])
    print(f"figures of {counted} of {len(outcomes)}: the first tenth of the time is left out")
    told = found["generator"]
    figures = client_figures(found, ttft_ms=LOAD_SLO.ttft_ms, tpot_ms=LOAD_SLO.tpot_ms)
    for name, value in figures.items():
        if value is not None and not name.startswith("goodput"):
            print(f"{FIGURES[name].title:<44} {value:10.2f} {FIGURES[name].unit}")
    print(
        f"sent late by {told['late_ms_p99']:.1f} ms at p99, {told['cpu_share']:.0%} of a core"
        + ("; the generator itself was the bottleneck" if told["bottleneck"] else "")
    )
    if found["stopped"]:
        told_of = f"stopped after {found['seconds'] + found['cut_off_s']:.1f} s"
        return _refuse(f"{told_of}; what was sent by then is in {flags.out}", INTERRUPTED)
    return WRONG if told["bottleneck"] or "failed" in outcomes else DONE


def _check_load(flags: argparse.Namespace) -> None:
    """Raise ValueError before anything is sent."""
    check_place(flags.out, "--out")
    if not 0 <= flags.cut_off_s <= SECONDS_MAX:
        raise ValueError(f"--cut-off-s must lie within 0 and {SECONDS_MAX}")
    try:
        if not isinstance(json.loads(flags.body), dict):
            raise ValueError("is no object")
    except ValueError as error:
        raise ValueError(f"--body {flags.body!r} is no JSON object: {error}") from None
    for flag, text in (("--name", flags.name), ("--api-key", flags.api_key or "")):
        if not (text.isascii() and text.isprintable()):
            raise ValueError(f"{flag} has what cannot stand in a header")


def _troubles(found: dict[str, Any]) -> list[str]:
    """Return what was said of requests that failed, the most frequent first."""
    said = Counter(
        f"{ask['status'] or 'no answer'}: {ask['error'] or 'cut off'}"
        for ask in found["asks"]
        if ask["outcome"] in ("failed", "refused")
    )
    return [
        f"{count} x " + "".join(letter if letter.isprintable() else " " for letter in text)
        for text, count in said.most_common(TROUBLES_SHOWN)
    ]


def _workload(flags: argparse.Namespace) -> int:
    check_place(flags.out, "--out")
    # An incident of one's own is lived through at its own lengths, unless a context is named.
    own = (flags.workload or "").startswith(RECORDED)
    workload = make(
        _recipe(flags, Recipe(context_tokens=2**20) if own else Recipe()),
        rate=flags.rate,
        seconds=flags.seconds,
        seed=flags.seed,
        concurrency=flags.concurrency,
    )
    check(workload)
    write(workload, flags.out)
    print(f"{len(workload.asks)} requests of {workload.source} in {flags.out}")
    return DONE
