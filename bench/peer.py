"""One engine under comparison: what a list says of it, and its process, told phases by lines.

Owns both; bench/peers.py has them take turns. A peer is a session of its own (bench/drive.py, and
the server that it may have started), so that what it uses of the machine can be told from what
others use meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.crowd import CrowdTime

ROOT = Path(__file__).parents[1]
SIDES = ("process", "http")
STOP_S = 30


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine at a precision, in process or over HTTP; `ours` is judged against the others."""

    name: str
    side: str
    precision: str
    driver: str
    ours: bool = False
    perplexity: float | None = None
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """Return what a table says of it beside its figures."""
        names = ("side", "precision", "perplexity", "ours")
        return {name: getattr(self, name) for name in names}


def read(path: Path, places: Mapping[str, str]) -> list[Peer]:
    """Return the peers of a list, with the words in braces replaced by places."""
    try:
        peers = [Peer(**filled(one, places)) for one in tomllib.loads(path.read_text())["peer"]]
    except (TypeError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"{path} is no list of peers: {error}") from None
    for peer in peers:
        if peer.side not in SIDES:
            raise SystemExit(f"{path}, {peer.name}: side is one of {', '.join(SIDES)}")
    return peers


def chosen(peers: list[Peer], side: str, parts: list[str]) -> list[Peer]:
    """Return the peers of a side, those whose names hold one of the parts if there are any."""
    found = [
        peer
        for peer in peers
        if peer.side == side and (not parts or any(part in peer.name for part in parts))
    ]
    if not found:
        raise SystemExit(f"no peer {side} with a name like {parts}")
    return found


def filled(value: Any, places: Mapping[str, str]) -> Any:
    """Return a TOML value whose strings have each {place} replaced."""
    if isinstance(value, dict):
        return {name: filled(part, places) for name, part in value.items()}
    if isinstance(value, list):
        return [filled(part, places) for part in value]
    if isinstance(value, str):
        for place, path in places.items():
            value = value.replace(f"{{{place}}}", path)
    return value


@dataclass(frozen=True)
class Running:
    """A peer's process."""

    peer: Peer
    process: "subprocess.Popen[str]"

    @classmethod
    def start(cls, peer: Peer, log: Path) -> Self:
        """Start it; `ready` tells when it is."""
        names = [f"{name}={value}" for name, value in peer.environment.items()]
        command = ["env", *names, peer.python, "-m", "bench.drive", f"bench.drive_{peer.driver}"]
        with log.open("a") as errors:
            process = subprocess.Popen(
                [*command, json.dumps(peer.settings)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        return cls(peer, process)

    def answer(self) -> dict[str, Any]:
        """Return its next line; exits when there is none, or an error in it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.peer.name} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise SystemExit(f"{self.peer.name}: {found['error']}")
        return found

    def run(self, phase: str) -> dict[str, Any]:
        """Return a phase's figures, and what share of the machine others had meanwhile."""
        assert self.process.stdin is not None
        with CrowdTime(self.process.pid) as crowd:
            print(phase, file=self.process.stdin, flush=True)
            found = self.answer()
        return found | {"lost": crowd.share}

    def stop(self) -> None:
        """End its whole session, gently first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_S)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
