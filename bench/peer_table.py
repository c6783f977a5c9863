"""A comparison as Markdown: a row a peer, medians of its runs, and how far ours is from the best.

Owns the tables alone; bench/peers.py prints them, and `python -m bench.peer_table FILE...` reads
them off what several of its runs wrote. Runs of one peer in several files stand together.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.workload import medians

LOST_MAX = 0.04
RATES = {"single": "one stream", "prefill": "prompt of 512", "mix": "mix of 64"}
LATENCIES = ("ttft", "itl")
SHARES = (50, 95, 99)

Report = dict[str, Any]
Runs = list[dict[str, Any]]


def tables(reports: Sequence[Report]) -> str:
    """Return the tables of what was measured: tokens a second, then arrivals at rates."""
    peers: dict[str, dict[str, Any]] = {}
    runs: dict[str, dict[str, Runs]] = {}
    for report in reports:
        peers |= report["peers"]
        for phase, by_peer in report["phases"].items():
            for name, some in by_peer.items():
                runs.setdefault(phase, {}).setdefault(name, []).extend(some)
    arrivals = [phase for phase in runs if phase.startswith(("poisson", "load"))]
    rates = [phase for phase in runs if phase not in arrivals]
    parts = [rates_table(peers, {phase: runs[phase] for phase in rates})] if rates else []
    parts += [arrivals_table(peers, phase, runs[phase]) for phase in arrivals]
    return "\n\n".join(parts)


def rates_table(peers: dict[str, dict[str, Any]], runs: dict[str, dict[str, Runs]]) -> str:
    """Return tokens a second by peer and phase, and ours over the best other."""
    names = [name for name in peers if any(name in by_peer for by_peer in runs.values())]
    heads = [RATES.get(phase, phase.partition(":")[2]) for phase in runs]
    lines = rows(["tokens a second", "precision", "perplexity", *heads, "lost"])
    for name in names:
        cells = [cell(by_peer.get(name), "tok_s") for by_peer in runs.values()]
        every = [run for by_peer in runs.values() for run in by_peer.get(name, [])]
        lines += row([*whose(name, peers[name]), *cells, lost(every)])
    best = [over_best(peers, by_peer) for by_peer in runs.values()]
    if any(best):
        lines += row(["ours over the best other", "", "", *best, ""])
    return "\n".join(lines)


def arrivals_table(peers: dict[str, dict[str, Any]], phase: str, runs: dict[str, Runs]) -> str:
    """Return latencies and the rate reached, by peer, of one phase with arrivals."""
    kind, rate, seconds = phase.split(":")
    share = f"{rate} of each one's own rate in the mix"
    told = share if kind == "load" else f"{rate} requests a second"
    lines = [f"Poisson arrivals for {seconds} s, {told}:", ""]
    heads = [f"{kind.upper()} p50 / p95 / p99, ms" for kind in LATENCIES]
    lines += rows(["", "precision", "perplexity", "requests/s", *heads, "output tok/s", "lost"])
    for name, some in runs.items():
        middle = medians([numbers(run) for run in some])
        asked = statistics.median(float(run["phase"].split(":")[1]) for run in some)
        latencies = [
            " / ".join(f"{middle[f'{kind}_p{share}_ms']:.0f}" for share in SHARES)
            for kind in LATENCIES
        ]
        cells = [f"{asked:.2f}", *latencies, f"{middle['tok_s']:,.0f}", lost(some)]
        lines += row([*whose(name, peers[name]), *cells])
    return "\n".join(lines)


def whose(name: str, told: dict[str, Any]) -> list[str]:
    """Return a row's first cells."""
    perplexity = told["perplexity"]
    return [name, told["precision"], f"{perplexity:.4f}" if perplexity else ""]


def numbers(run: dict[str, Any]) -> dict[str, float]:
    """Return a run's figures."""
    return {name: value for name, value in run.items() if isinstance(value, (int, float))}


def cell(runs: Runs | None, figure: str) -> str:
    """Return a figure's median, and its range where there are more runs than one."""
    if not runs:
        return ""
    values = [run[figure] for run in runs]
    middle = f"{statistics.median(values):,.0f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.0f} to {max(values):,.0f})"


def lost(runs: Runs) -> str:
    """Return the most that others had in a run; those over the limit are counted."""
    over = sum(run["lost"] > LOST_MAX for run in runs)
    most = f"{100 * max(run['lost'] for run in runs):.1f} %"
    return f"{most}; {over} of {len(runs)} over 4 %" if over else most


def over_best(peers: dict[str, dict[str, Any]], by_peer: dict[str, Runs]) -> str:
    """Return how many times the best other our best is, by medians."""
    best = {
        ours: max(
            (
                statistics.median(run["tok_s"] for run in runs)
                for name, runs in by_peer.items()
                if peers[name]["ours"] is ours
            ),
            default=0.0,
        )
        for ours in (True, False)
    }
    return f"{best[True] / best[False]:.2f}" if best[True] and best[False] else ""


def rows(heads: list[str]) -> list[str]:
    """Return a table's head."""
    return [*row(heads), "|---" * len(heads) + "|"]


def row(cells: list[str]) -> list[str]:
    """Return a table's line, in a list."""
    return ["| " + " | ".join(cells) + " |"]


def main() -> int:
    """Print the tables of some reports."""
    print(tables([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
