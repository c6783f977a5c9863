"""Our engine and others on one machine, in one run: each phase in turn on each, round after round.

Each peer is a process (bench/drive.py) that is told phases by lines, so that all see the same
minutes of a shared machine; what others took of the CPU is measured around each phase, and rounds
with more than 4 % of it lost are named. Prints medians as a table; --json FILE writes all.

    python -m bench.peers ours=iterscope:{} ov='openvino@/tmp/ov/bin/python:{"path": "m.gguf"}'
    python -m bench.peers a='http:{"url": "http://127.0.0.1:8000"}' b='http:{"url": ...}'
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import StolenTime, describe
from bench.workload import medians

PHASES = ("single", "prefill", "batch:8", "batch:32", "batch:64", "mix")
LOST_MAX = 0.04
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Peer:
    """A process that answers phases."""

    name: str
    process: "subprocess.Popen[str]"

    @classmethod
    def start(cls, told: str) -> "Peer":
        """Start NAME=DRIVER[@PYTHON]:{json}."""
        name, _, rest = told.partition("=")
        module, _, settings = rest.partition(":")
        module, _, python = module.partition("@")
        command = [python or sys.executable, "-m", "bench.drive", f"bench.drive_{module}"]
        peer = cls(
            name,
            subprocess.Popen(
                [*command, settings or "{}"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ),
        )
        peer.answer()
        return peer

    def answer(self) -> dict[str, Any]:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, phase: str) -> dict[str, Any]:
        """Return a phase's figures, and what share of the CPU others took meanwhile."""
        assert self.process.stdin is not None
        with StolenTime() as stolen:
            print(phase, file=self.process.stdin, flush=True)
            found = self.answer()
        if "error" in found:
            raise SystemExit(f"{self.name}, {phase}: {found['error']}")
        return found | {"stolen": stolen.share}


def main() -> int:
    """Let the peers take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="+", metavar="NAME=DRIVER[@PYTHON]:{settings}")
    parser.add_argument("--phases", nargs="*", default=PHASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    peers = [Peer.start(told) for told in flags.peers]
    for peer in peers:
        peer.run("batch:4")  # warm
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        phase: {peer.name: [] for peer in peers} for phase in flags.phases
    }
    with StolenTime() as stolen:
        for turn in range(flags.rounds):
            for phase in flags.phases:
                for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                    found[phase][peer.name].append(peer.run(phase))
    for peer in peers:
        peer.process.terminate()
        peer.process.wait()
    report = table(found)
    print(report)
    if flags.json:
        flags.json.write_text(json.dumps({"phases": found} | describe(stolen), indent=1))
    return 0


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return medians, a line a phase and figure, a column a peer."""
    names = list(next(iter(found.values())))
    lines = ["| phase | figure | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for phase, by_peer in found.items():
        middle = {name: medians(runs) for name, runs in by_peer.items()}
        for figure in middle[names[0]]:
            if figure == "stolen":
                continue
            cells = " | ".join(f"{middle[name][figure]:.4g}" for name in names)
            lines.append(f"| {phase} | {figure} | {cells} |")
        lost = sum(run["stolen"] > LOST_MAX for runs in by_peer.values() for run in runs)
        if lost:
            lines.append(f"| {phase} | runs with over 4 % of the CPU lost | {lost} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
