"""Writes the dashboards: `python -m grafana.generate`, after a change of a board or of METRICS.

Owns the file names under grafana/dashboards/; a test holds that what is committed is what this
writes. Needs the packages of the test extra, and nothing that runs. Must never write elsewhere.
"""

from pathlib import Path

from grafana import health, kv, latency, overview, scheduler, tenants
from grafana.board import json_of
from grafana.post_mortem import UID, json_of_post_mortem

FOLDER = Path(__file__).resolve().parent / "dashboards"


def dashboards() -> dict[str, str]:
    """Return the content of each file by its name."""
    boards = (
        overview.BOARD,
        scheduler.BOARD,
        kv.BOARD,
        latency.BOARD,
        tenants.BOARD,
        health.BOARD,
    )
    return {_name(board.uid): json_of(board) for board in boards} | {
        _name(UID): json_of_post_mortem()
    }


def _name(uid: str) -> str:
    return f"{uid.removeprefix('iterscope-')}.json"


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
