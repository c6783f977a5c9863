"""What an alert and a recording rule are made of, before they are written for any program.

Owns the two entries that recordings.py and the alerts' own tables are filled with; alert_files.py
writes them out and the tests read them. An alert's figure and its limit stand apart, so that both
systems show the figure, and a test knows what 90 % of the limit is. Holds no rule and no text.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket"]
Shown = Literal["percent", "duration", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A figure that Prometheus keeps under a name of its own."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One reason to call somebody: it fires where `value` has been above `above` for `for_s`."""

    name: str
    severity: Severity
    value: str
    """PromQL of the figure; it has no element where nothing can be said (nothing ran, no data)."""
    above: float
    where: tuple[str, ...] = ()
    """PromQL with elements of the same labels: the figure counts where each has one."""
    for_s: int
    shown: Shown
    summary: str
    """One sentence for people: {value} stands for the figure, other names for labels."""
    query: str
    """The named query that tells the requests behind the figure."""
    last_s: int | None = 900
    """The window of that query, if it takes one."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that tell rules of one name apart."""
    fires_on: str
    silent_on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Alerts that are evaluated together."""

    name: str
    alerts: tuple[Alert, ...]
