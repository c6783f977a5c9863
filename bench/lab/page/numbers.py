"""How a page writes figures: three digits, the unit beside them, an interval behind them.

Owns every number that a person reads in a report and in what tune prints. A figure that nobody
knows is a dash, never a zero. Knows no result.
"""

import math

NOTHING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def plain(value: float | None) -> str:
    """Return a number with three digits that count."""
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    if value == round(value) and size < 1e15:
        shown = f"{value:,.0f}"
    elif size < 0.01:
        shown = f"{value:.2g}"
    else:
        shown = f"{value:,.{digits}f}"
    return shown.replace("-", MINUS)


def short(value: float | None) -> str:
    """Return a number that was chosen, not measured: no zeros at its end."""
    shown = plain(value)
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def sentence(words: str) -> str:
    """Return words as a sentence: a capital at the begin, a stop at the end."""
    whole = words[:1].upper() + words[1:]
    return whole if whole.endswith((".", "!", "?")) or not whole else f"{whole}."


def counted(count: int, what: str) -> str:
    """Return how many there are of something, one of them in the singular."""
    return f"{plain(count)} {what}" + ("" if count == 1 else "s")


def valued(value: float | None, unit: str) -> str:
    """Return a number with its unit: shares in percent, long times in seconds."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if unit == "share":
        return f"{plain(round(100 * value, 2))} %"
    if unit == "ms" and abs(value) >= 1000:
        return f"{plain(value / 1000)} s"
    return f"{plain(value)} {unit}".rstrip()


def ranged(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    """Return a figure and its interval."""
    shown = valued(value, unit)
    if value is None or low is None or high is None:
        return shown
    return f"{shown} ({valued(low, unit)} to {valued(high, unit)})"


def ratio(value: float | None) -> str:
    """Return how many times as much."""
    return NOTHING if value is None else f"{plain(value)}{TIMES}"


def times(row: dict[str, object]) -> str:
    """Return a comparison's value and interval: a ratio as times, a difference with its sign."""
    value, low, high = (_float(row.get(name)) for name in ("value", "low", "high"))
    if value is None:
        return NOTHING
    shown = ratio if row.get("kind") == "ratio" else _signed
    if low is None or high is None:
        return shown(value)
    return f"{shown(value)} ({shown(low)} to {shown(high)})"


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _signed(value: float | None) -> str:
    shown = plain(value)
    return shown if value is None or value < 0 else f"+{shown}"
