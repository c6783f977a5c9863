"""Our engine and others on one machine, in one run: each phase in turn on each, round after round.

Each peer of a list (bench/peers.toml) is a process that is told phases by lines, so that all see
the same minutes of a shared machine. A phase in which others had more than 4 % of it is repeated,
then kept and named. Prints medians as Markdown, --json FILE writes all runs (bench/peer_table.py).

    python -m bench.peers bench/peers.toml --at ~/peers --side process --phases single mix
    python -m bench.peers bench/peers.toml --at ~/peers --side http --phases mix load:0.9:60

Phases: single, prefill, batch:B, mix, poisson:RATE:SECONDS (requests a second), and
load:SHARE:SECONDS, arrivals at that share of what the peer itself served in the mix before.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.machine import StolenTime, describe
from bench.peer import SIDES, Running, chosen, read
from bench.peer_table import tables
from bench.workload import DEMO_MODEL

PHASES = ("single", "prefill", "batch:8", "batch:32", "batch:64", "mix")
LOST_MAX = 0.04
WARM = "batch:2"

Runs = list[dict[str, Any]]


def main() -> int:
    """Let the peers take turns."""
    flags = _flags()
    with tempfile.TemporaryDirectory() as fresh:
        places = {
            "at": str(flags.at.absolute()),
            "model": str(flags.model),
            "python": sys.executable,
            "fresh": fresh,
        }
        peers = chosen(read(flags.list, places), flags.side, flags.only)
        log = Path(fresh) / "log"
        running: list[Running] = []
        try:
            for peer in peers:
                running.append(Running.start(peer, log))
                running[-1].answer()
            with StolenTime() as stolen:
                found = compare(running, flags)
        except SystemExit:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            for one in running:
                one.stop()
    told = {peer.name: peer.told for peer in peers}
    report = {"peers": told, "phases": found} | describe(stolen)
    print(tables([report]))
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1))
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path, help="whom to compare, TOML")
    parser.add_argument("--at", type=Path, default=Path(), help="the others' folder")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--side", choices=SIDES, default=SIDES[0])
    parser.add_argument("--only", nargs="*", default=[], help="peers whose names hold one of these")
    parser.add_argument("--phases", nargs="*", default=PHASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--again", type=int, default=2, help="repeats of a run with too much lost")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def compare(running: list[Running], flags: argparse.Namespace) -> dict[str, dict[str, Runs]]:
    """Return runs by phase and peer; who begins changes from round to round."""
    for one in running:
        one.run(WARM)
    found: dict[str, dict[str, Runs]] = {
        phase: {one.peer.name: [] for one in running} for phase in flags.phases
    }
    for turn in range(flags.rounds):
        for phase in flags.phases:
            for one in running[turn % len(running) :] + running[: turn % len(running)]:
                name = one.peer.name
                told = resolved(phase, found.get("mix", {}).get(name, []))
                run = quiet_run(one, told, flags.again)
                found[phase][name].append(run)
                print(f"{turn} {phase} {name}: {shown(run)}", file=sys.stderr, flush=True)
    return found


def resolved(phase: str, mixes: Runs) -> str:
    """Return a phase as a driver knows it: a load is a rate of arrivals."""
    kind, _, rest = phase.partition(":")
    if kind != "load":
        return phase
    share, _, seconds = rest.partition(":")
    if not mixes:
        raise SystemExit(f"{phase}: needs the mix before it, to know the rate")
    rate = float(share) * statistics.median(run["requests_s"] for run in mixes)
    return f"poisson:{rate:.3f}:{seconds}"


def quiet_run(one: Running, phase: str, again: int) -> dict[str, Any]:
    """Return the first run with little lost, or that with the least of all tries."""
    tries: Runs = []
    while len(tries) <= again:
        tries.append(one.run(phase) | {"phase": phase})
        if tries[-1]["lost"] <= LOST_MAX:
            break
    return min(tries, key=lambda run: run["lost"]) | {"tries": len(tries)}


def shown(run: dict[str, Any]) -> str:
    """Return a run in a line."""
    return " ".join(f"{k} {v:.4g}" for k, v in run.items() if isinstance(v, float))


if __name__ == "__main__":
    sys.exit(main())
