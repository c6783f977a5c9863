"""An experiment carried out: servers up, capacity measured, every run of the plan once, in order.

Owns the folder that an experiment lives in and its resumption: each run that is done is one file,
written whole, so what was done stays done whatever ends the rest. lab_command.py calls it and
result.py reads the folder. Must never have two servers under load at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.lab import equality
from bench.lab.ceiling import ceiling
from bench.lab.files import read_json, write_json
from bench.lab.make import make
from bench.lab.measure import Send, measure, sent
from bench.lab.plan import Arm, Cell, Plan, blocks
from bench.lab.progress import Shown
from bench.lab.serving import PROGRAM, Served, serving
from bench.lab.workload import Workload, WorkloadError, write
from bench.machine import StolenTime, describe

CAPACITY_ASKS_A_SECOND = 60
CAPACITY_TRIES = 2
CAPACITY_SETTLE = 0.25
"""So much of the capacity's run is left out: all slots prefill at once at its begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where an experiment lives, and what serves each arm (a program that takes `serve`)."""

    out: Path
    plan: Plan
    programs: dict[str, Sequence[str]]

    def program(self, arm: Arm) -> Sequence[str]:
        """Return what serves an arm."""
        return self.programs.get(arm.name, PROGRAM)

    def run_file(self, cell: Cell) -> Path:
        """Return the file of a run that is done."""
        return self.out / "runs" / f"{cell.name}.json.gz"

    def workload_file(self, cell: Cell) -> Path:
        """Return the file of the workload that all arms of a rate and repeat get."""
        return self.out / "workloads" / f"{cell.repeat}-{cell.fraction:.3f}.json.gz"

    def server_folder(self, cell: Cell) -> Path:
        """Return where the server of a run keeps its history."""
        life = str(cell.repeat) if self.plan.fresh_servers else "all"
        return self.out / "servers" / f"{life}-{cell.arm.safe_name}"


def perform(bench: Bench, *, quiet: bool = False) -> None:
    """Do every run that is not done; raises ServerFailed, WorkloadError, KeyboardInterrupt."""
    plan = bench.plan
    for name in ("runs", "workloads", "equality", "servers"):
        (bench.out / name).mkdir(parents=True, exist_ok=True)
    agree(bench)
    done = sum(bench.run_file(cell).exists() for cell in cells(plan))
    stolen = StolenTime()
    try:
        with Shown(plan.runs, plan.seconds + plan.cut_off_s, quiet=quiet) as shown, stolen:
            shown.skipped(done)
            if plan.fresh_servers:
                for repeat in range(plan.repeats):
                    _perform(bench, [repeat], shown)
            else:
                _perform(bench, list(range(plan.repeats)), shown)
    finally:
        _note_machine(bench, describe(stolen))


def agree(bench: Bench) -> None:
    """Write the plan, or hold it against the one that is there; raises WorkloadError.

    A plan of which nothing was measured, as after a slip of the pen, gives way.
    """
    asked = msgspec.json.decode(msgspec.json.encode(bench.plan))  # as the file has it
    path = bench.out / "plan.json"
    measured = (bench.out / "capacity.json").exists() or any((bench.out / "runs").iterdir())
    if path.exists() and measured:
        there = read_json(path)
        parted = sorted(name for name in asked if asked[name] != there.get(name))
        if parted:
            raise WorkloadError(
                f"--out {bench.out} holds another experiment: {', '.join(parted)} "
                f"{'differs' if len(parted) == 1 else 'differ'}; name another folder"
            )
        return
    write_json(path, asked)


def cells(plan: Plan) -> Iterator[Cell]:
    """Yield every run in its order."""
    for repeat in range(plan.repeats):
        for block in blocks(plan, repeat):
            yield from block


def _perform(bench: Bench, repeats: list[int], shown: Shown) -> None:
    """Do what is left of some repeats with servers that stand all the while."""
    left = [
        block
        for repeat in repeats
        for block in blocks(bench.plan, repeat)
        if not all(bench.run_file(cell).exists() for cell in block)
    ]
    if not left:
        return
    with ExitStack() as stack:
        servers: dict[str, Served] = {}
        for cell in sorted(left[0], key=lambda cell: bench.plan.arms.index(cell.arm)):
            arm = cell.arm
            shown.says(f"starting {arm.name}")
            flags = bench.plan.server_flags(arm)
            served = serving(bench.server_folder(cell), flags, bench.program(arm))
            servers[arm.name] = stack.enter_context(served)
            warm_up(bench, servers[arm.name], repeats[0])
        capacity = capacity_of(bench, servers[bench.plan.baseline.name], shown)
        _measure_ceiling(bench, capacity, shown)
        for block in left:
            _block(bench, block, servers, capacity, shown)


def _block(
    bench: Bench,
    block: list[Cell],
    servers: dict[str, Served],
    capacity: dict[str, Any],
    shown: Shown,
) -> None:
    workload = workload_of(bench, block[0], capacity)
    for cell in block:
        if not bench.run_file(cell).exists():
            _run(bench, cell, workload, servers[cell.arm.name], shown)
    _compare_answers(bench, block, workload, servers[bench.plan.baseline.name])


def _run(bench: Bench, cell: Cell, workload: Workload, served: Served, shown: Shown) -> None:
    plan = bench.plan
    shown.says(f"repeat {cell.repeat + 1}, {cell.fraction:g} x capacity, {cell.arm.name}")
    send = Send(
        # An attempt that was cut short has left its requests on record: names are never the same.
        name=f"{cell.name}-{_attempts(served, cell.name)}",
        cut_off_s=plan.cut_off_s,
        slo=plan.slo,
        scratch=bench.out / "scratch",
        tick=shown.ticks,
    )
    found = measure(served, workload, send)
    run = found.run | {
        "arm": cell.arm.name,
        "repeat": cell.repeat,
        "fraction": cell.fraction,
        "requests_s": workload.rate,
        "order": sum(1 for _ in (bench.out / "runs").glob("*.json.gz")) + 1,
        "name": send.name,
        "history": str(served.history.relative_to(bench.out)),
    }
    whole = {"run": run, "load": found.load, "steps": found.steps}
    write_json(bench.run_file(cell), whole | {"causes": found.causes, "rounds": found.rounds})
    figures = run["figures"]
    shown.ran(
        f"{cell.fraction:g} x capacity, {cell.arm.name}: {figures['output_tok_s']:.0f} tokens/s, "
        f"first token p99 {figures['ttft_p99_ms'] or 0:.0f} ms, "
        f"{100 * (figures['goodput_share'] or 0):.0f} % in time",
        run["seconds"],
    )


def _attempts(served: Served, name: str) -> int:
    query = (
        "SELECT count(DISTINCT regexp_extract(external_id, '^(.*)-[0-9]+$', 1)) "
        "FROM request_start WHERE external_id LIKE $1"
    )
    return int(served.sql(query, [f"{name}-%"])[0][0])


def workload_of(bench: Bench, cell: Cell, capacity: dict[str, Any]) -> Workload:
    """Return what all arms of a rate and repeat are asked, and keep it as a file."""
    plan = bench.plan
    workload = make(
        plan.recipe,
        rate=cell.fraction * capacity["requests_s"],
        seconds=plan.seconds,
        seed=seed_of(plan, cell.repeat, plan.fractions.index(cell.fraction)),
    )
    write(workload, bench.workload_file(cell))
    return workload


def seed_of(plan: Plan, repeat: int, place: int) -> int:
    """Return the seed of a repeat's rate; no two share one."""
    return (plan.seed * 1000 + repeat) * 1000 + place


def warm_up(bench: Bench, served: Served, repeat: int) -> None:
    """Let a server serve for a moment; nothing of it is measured."""
    plan = bench.plan
    workload = make(
        plan.recipe,
        rate=CAPACITY_ASKS_A_SECOND,
        seconds=plan.warm_up_s,
        seed=seed_of(plan, repeat, 999),
        concurrency=plan.max_num_seqs,
    )
    send = Send(
        name=f"warm-{_attempts(served, 'warm')}",
        cut_off_s=plan.warm_up_s,
        slo=plan.slo,
        scratch=bench.out / "scratch",
    )
    sent(served.url, workload, send)
    served.wait_idle()


def capacity_of(bench: Bench, served: Served, shown: Shown) -> dict[str, Any]:
    """Return how many requests a second the baseline ends with all its slots full."""
    path = bench.out / "capacity.json"
    if path.exists():
        return dict(read_json(path))
    tries = []
    for number in range(CAPACITY_TRIES):
        shown.says(f"measuring capacity, {number + 1} of {CAPACITY_TRIES}")
        tries.append(_full_slots(bench, served, number))
    # What disturbs a machine only slows it: the fastest try was disturbed least.
    found = max(tries, key=lambda one: float(one["requests_s"])) | {"tries": tries}
    write_json(path, found)
    shown.says(f"capacity: {found['requests_s']:.2f} requests/s, {found['output_tok_s']:.0f} tok/s")
    return found


def _full_slots(bench: Bench, served: Served, number: int) -> dict[str, Any]:
    """Return the rates of a closed loop that keeps all slots full and a few waiting."""
    plan = bench.plan
    workload = make(
        plan.recipe,
        rate=CAPACITY_ASKS_A_SECOND,
        seconds=plan.capacity_s,
        seed=seed_of(plan, 0, 900 + number),
        concurrency=plan.max_num_seqs + plan.max_num_seqs // 2,
    )
    send = Send(
        name=f"capacity-{_attempts(served, 'capacity')}",
        cut_off_s=0.0,
        slo=plan.slo,
        scratch=bench.out / "scratch",
    )
    load = sent(served.url, workload, send)
    served.wait_idle()
    instants = [at_ns for ask in load["asks"] for at_ns in ask["tokens_ns"]]
    # A fast server has answered all there was before the time is over; the rest is no part of it.
    end_ns = min(plan.capacity_s * 1e9, max(instants, default=0) + 1)
    begin_ns = CAPACITY_SETTLE * end_ns
    seconds = (end_ns - begin_ns) / 1e9
    tokens = sum(begin_ns <= at_ns < end_ns for at_ns in instants)
    if not tokens:
        told = next((ask["error"] for ask in load["asks"] if ask["error"]), "no error")
        raise WorkloadError(f"the baseline brought no token, its capacity is unknown: {told}")
    # Tokens over the mean length of those that were sent: ends alone are few and come in lumps.
    mean_output = sum(ask["wanted"] for ask in load["asks"]) / len(load["asks"])
    return {
        "requests_s": tokens / seconds / mean_output,
        "output_tok_s": tokens / seconds,
        "arm": plan.baseline.name,
        "concurrency": workload.concurrency,
        "seconds": seconds,
    }


def _measure_ceiling(bench: Bench, capacity: dict[str, Any], shown: Shown) -> None:
    path = bench.out / "ceiling.json"
    if bench.plan.ceiling_multiples and not path.exists():
        shown.says("measuring how much the generator itself can send")
        top = max(bench.plan.fractions) * capacity["requests_s"]
        plan = bench.plan
        found = ceiling(plan.recipe, top, bench.out / "scratch", plan.ceiling_multiples)
        write_json(path, found)


def _compare_answers(bench: Bench, block: list[Cell], workload: Workload, asked: Served) -> None:
    """Hold the arms' tokens against the baseline's, and ask its server how close a choice was."""
    path = bench.out / "equality" / f"{block[0].repeat}-{block[0].fraction:.3f}.json"
    if path.exists():
        return
    loads = {cell.arm.name: read_json(bench.run_file(cell))["load"] for cell in block}
    baseline = loads[bench.plan.baseline.name]
    dtype = asked.sql("SELECT dtype FROM run LIMIT 1")[0][0]
    found = []
    for name, load in loads.items():
        if load is not baseline:
            compared, parted = equality.differences(load, baseline)
            judged = equality.judged(asked, workload, parted, dtype)
            found.append({"arm": name, "compared": compared, "dtype": dtype, "parted": judged})
    write_json(path, found)


def _note_machine(bench: Bench, described: dict[str, Any]) -> None:
    """Keep what each start of the experiment ran on; a resumed one has several."""
    path = bench.out / "machine.json"
    starts = read_json(path) if path.exists() else []
    write_json(path, [*starts, described])
