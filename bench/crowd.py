"""What share of the machine others had while something was measured: the host, and other programs.

Owns the reading of /proc for it; bench/peers.py asks around each phase. A session's processes are
those that were started with it (`start_new_session`) and all that they started. Measures no
product; where there is no /proc the share is 0.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")
STOLEN, ALL = 7, 8
IDLE = (3, 4)
SESSION, USER_TICKS, SYSTEM_TICKS, CHILD_TICKS = 3, 11, 12, (13, 14)
"""Fields of a process's stat behind its name; proc(5)."""


class CrowdTime:
    """Inside the `with`: what the host stole, and what programs of other sessions used."""

    def __init__(self, session: int) -> None:
        self.share = 0.0
        self._session = session
        self._from = (0, 0, 0)

    def __enter__(self) -> Self:
        self._from = self._read()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        busy, everything, ours = (
            after - before for after, before in zip(self._read(), self._from, strict=True)
        )
        self.share = max(0.0, busy - ours) / max(1, everything)

    def _read(self) -> tuple[int, int, int]:
        """Return ticks since boot: not idle (stolen ones too), all, and the session's."""
        stat = PROC / "stat"
        if not stat.exists():
            return 0, 0, 0
        fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:]][:ALL]
        return sum(fields) - sum(fields[place] for place in IDLE), sum(fields), self._ours()

    def _ours(self) -> int:
        ticks = 0
        for folder in PROC.glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(fields[SESSION]) == self._session:
                ticks += int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
                ticks += sum(int(fields[place]) for place in CHILD_TICKS)
        return ticks
