"""A picture of a server as lines of a terminal: what `iterscope top` shows at a width and a height.

Owns the layout, the colours and the cutting to cells; server/top_command.py prints the lines. A
frame is a pure function of its picture. Ids, tenants and names were given by strangers: must never
let one reach the terminal as anything but text on its own line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from server.pace import Percentiles
from server.terminal import printable
from server.top_picture import Picture, Row, Wait

PHASE_STYLES = {
    "decode": ("█", "green"),
    "prefill": ("▒", "magenta"),
    "recompute": ("▓", "yellow"),
}
OTHER_PHASE = ("?", "dim")
BAR_CELLS = 20
LABEL_CELLS = 9
ID_CELLS, ID_CELLS_MAX = 18, 41
NARROW_CELLS = 80
"""At this width a request's name has ID_CELLS; what a terminal has more goes to the name."""

KV_FULL_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the watch stands: `away` says why there is no stream now; notes are times and lines."""

    away: str | None
    notes: Sequence[tuple[str, str]]
    keys: bool


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its head, its width, and whether it stands at the right."""

    head: str
    cells: int
    right: bool = False


RUNNING_COLUMNS = (
    Column("tenant", 10),
    Column("phase", 9),
    Column("prompt", 6, right=True),
    Column("output", 11, right=True),
    Column("kv", 5, right=True),
    Column("age", 6, right=True),
    Column("gap", 8, right=True),
)
WAITING_COLUMNS = (
    Column("tenant", 10),
    Column("prompt", 6, right=True),
    Column("age", 6, right=True),
    Column("waits for", 70),
)


def frame(picture: Picture, link: Link, width: int | None, height: int | None = None) -> list[Text]:
    """Return at most `height` lines of at most `width` cells; without these, all there is."""
    lines = [_title(picture), *_gauges(picture)]
    lines += [_link_line(picture, link)]
    lines += [_labelled("", Text(f"{at} {shown(note)}", "yellow")) for at, note in link.notes]
    rest = None if height is None else max(0, height - len(lines) - link.keys)
    lines += _tables(picture, width, rest)
    if link.keys:
        room = (height or 0) - 1
        lines = [*lines[:room], *[Text("")] * (room - len(lines)), Text("q quits", "dim")]
    for line in lines[:height]:
        if width is not None:
            line.truncate(width, overflow="ellipsis")
    return lines[:height]


def shown(text: str, cells: int | None = None) -> str:
    """Return a stranger's text as what a terminal shows as itself, cut or filled to `cells`."""
    safe = "".join(
        one if one.isprintable() else f"\\u{ord(one):04x}" for one in printable(text[:1000])
    )
    if cells is None:
        return safe
    if cell_len(safe) > cells:
        return set_cell_size(safe, cells - 1) + "…"
    return set_cell_size(safe, cells)


# ---- the upper lines


def _title(picture: Picture) -> Text:
    title = Text.assemble(("iterscope top ", "bold"), (shown(picture.model or "no engine"), "cyan"))
    title.append(f" at {shown(picture.url)}")
    title.append(f"  up {_duration(picture.up_s)}")
    if picture.run_id is not None:
        title.append(f"  run {shown(picture.run_id)}, engine {picture.generation}", "dim")
    return title


def _gauges(picture: Picture) -> list[Text]:
    rates, step, kv, seen = picture.rates, picture.step, picture.kv, picture.seen
    lines = [
        _labelled(
            "engine",
            Text.assemble(
                (f"{rates.iterations_per_s:.1f}", "bold"),
                f" it/s  step {_ms(rates.step_ms)}  busy ",
                (f"{100 * rates.busy_share:.0f} %", "bold"),
                f"  output {rates.output_tokens_per_s:,.0f} tok/s"
                f"  prompt {rates.prefill_tokens_per_s:,.0f} tok/s",
                (f"  over {rates.over_s:.0f} s", "dim"),
            ),
        )
    ]
    if step is not None:
        lines.append(_labelled("batch", _batch(picture)))
    if kv is not None and kv.total:
        used, cached = kv.used / kv.total, kv.cached / kv.total
        bar = _bar([("█", "red" if used > KV_FULL_SHARE else "blue", used), ("░", "blue", cached)])
        bar.append(f" {100 * used:.0f} % used, {100 * cached:.0f} % cached of {kv.total:,} blocks")
        lines.append(_labelled("kv", bar))
    lines.append(_labelled("queue", _queue(picture)))
    for name, found in (("ttft", picture.ttft), ("itl", picture.itl)):
        lines.append(_labelled(name, _percentiles(found)))
    ended = ", ".join(f"{count:,} {finish}" for finish, count in sorted(seen.ended.items()))
    text = Text(f"ended {ended or 'none'}; rejected {seen.rejected:,}; ")
    text.append(f"preempted {seen.preemptions:,}; ", "yellow" if seen.preemptions else "")
    text.append(f"faults {seen.faults:,}", "red" if seen.faults else "")
    lines.append(_labelled("seen", text))
    return lines


def _batch(picture: Picture) -> Text:
    step = picture.step
    assert step is not None
    rows = len(step.rows)
    size = max(step.rows_max, rows, 1)
    parts = [
        (glyph, style, step.rows.count(phase) / size)
        for phase, (glyph, style) in PHASE_STYLES.items()
    ]
    others = sum(phase not in PHASE_STYLES for phase in step.rows)
    text = _bar([*parts, (*OTHER_PHASE, others / size)])
    text.append(f" {rows} of {size} rows: ")
    text.append(f"prefill {step.prefill_tokens:,}", "magenta")
    text.append(" + ")
    text.append(f"decode {step.decode_tokens:,}", "green")
    text.append(f" of {step.token_budget:,} tokens")
    if step.padding_tokens or step.idle_rows:
        text.append(f"; padding {step.padding_tokens}, idle rows {step.idle_rows}", "yellow")
    return text


def _queue(picture: Picture) -> Text:
    step = picture.step
    text = Text(f"{len(picture.running)} running, ")
    text.append(f"{len(picture.waiting)} waiting", "yellow" if picture.waiting else "")
    if picture.waiting and step is not None and step.admission_stop != "no_waiting":
        text.append(f"; held by {step.admission_stop}")
        if step.blocker is not None:
            text.append(f" at {shown(step.blocker, None)}")
    if step is not None:
        ago = f", {_duration(step.ended_s_ago)} ago" if step.ended_s_ago > 1 else ""
        text.append(f"  last step {step.number:,}{ago}", "dim")
    return text


def _percentiles(found: Percentiles | None) -> Text:
    if found is None:
        return Text("none yet", "dim")
    text = Text(f"p50 {_ms(found.p50_ms)}  p90 {_ms(found.p90_ms)}  p99 {_ms(found.p99_ms)}")
    return text.append(f"  of the newest {found.count:,}", "dim")


def _link_line(picture: Picture, link: Link) -> Text:
    seen = picture.seen
    if link.away is not None:
        return _labelled("record", Text(f"no stream: {shown(link.away)}", "bold red"))
    lost = seen.records_lost or seen.iterations_dropped
    text = Text("live; ")
    text.append(
        f"{seen.records_lost:,} records lost, {seen.iterations_dropped:,} iterations dropped",
        "bold red" if lost else "",
    )
    return _labelled("record", text)


# ---- the tables


def _tables(picture: Picture, width: int | None, rest: int | None) -> list[Text]:
    """Return both tables within `rest` lines; the one that waits keeps a third of them."""
    waiting, running = picture.waiting, picture.running
    spare = ID_CELLS_MAX if width is None else width - NARROW_CELLS
    name = min(ID_CELLS_MAX, ID_CELLS + max(0, spare))
    if rest is None:
        rows_waiting, rows_running = len(waiting), len(running)
    else:
        free = max(0, rest - 2 - (2 if waiting else 0))
        rows_waiting = min(len(waiting), max(free // 3, free - len(running)))
        rows_running = min(len(running), free - rows_waiting)
    lines = [Text(""), _head(f"running {len(running)}", name, RUNNING_COLUMNS, width)]
    lines += _some([_running(row, name) for row in running[:rows_running]], len(running))
    if waiting:
        lines += [Text(""), _head(f"waiting {len(waiting)}", name, WAITING_COLUMNS, width)]
        lines += _some([_waiting(one, name) for one in waiting[:rows_waiting]], len(waiting))
    return lines


def _some(lines: list[Text], total: int) -> list[Text]:
    """Return the lines; where some are left out the last one says how many."""
    if len(lines) == total:
        return lines
    left = total - max(0, len(lines) - 1)
    return [*lines[:-1], Text(f"and {left:,} more", "dim")] if lines else []


def _head(first: str, name_cells: int, columns: Sequence[Column], width: int | None) -> Text:
    heads = _cells(first, name_cells, columns, [one.head for one in columns])
    return Text(heads.ljust(width or 0), "reverse")


def _running(row: Row, name_cells: int) -> Text:
    _, style = PHASE_STYLES.get(row.state, OTHER_PHASE)
    gap = row.gap_ms
    if row.silent_ms is not None and (gap is None or row.silent_ms > 2 * gap):
        gap = row.silent_ms  # its next token is late: that is what there is to see
    phase = row.state
    if phase in {"prefill", "recompute"} and row.prompt_tokens:
        whole = row.prompt_tokens + row.output_tokens
        phase = f"{phase[:3]} {100 * row.computed_tokens // whole:.0f} %"
    cells = (
        row.tenant,
        phase,
        f"{row.prompt_tokens}",
        f"{row.output_tokens}/{row.max_tokens}",
        f"{row.kv_blocks}",
        _duration(row.age_s),
        _ms(gap),
    )
    name = row.external_id or row.request_id
    return _styled(_cells(name, name_cells, RUNNING_COLUMNS, cells), phase, style)


def _waiting(one: Wait, name_cells: int) -> Text:
    why = one.reason if one.behind is None else f"{one.reason}, behind {one.behind}"
    if one.preempted is not None:
        why = f"preempted ({one.preempted}); {why}"
    cells = (one.tenant, f"{one.prompt_tokens}", _duration(one.age_s), why)
    name = one.external_id or one.request_id
    return _styled(_cells(name, name_cells, WAITING_COLUMNS, cells), one.reason, "yellow")


def _styled(line: str, part: str, style: str) -> Text:
    """Return a row of a table with one part of it, the last such, coloured."""
    text = Text(line)
    begin = line.rfind(part)
    if begin >= 0:
        text.stylize(style, begin, begin + len(part))
    return text


def _cells(name: str, name_cells: int, columns: Sequence[Column], cells: Sequence[str]) -> str:
    found = [shown(name, name_cells)]
    for column, cell in zip(columns, cells, strict=True):
        text = shown(cell, column.cells)
        found.append(text.rstrip().rjust(column.cells) if column.right else text)
    return " ".join(found).rstrip()


# ---- small things


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((label.ljust(LABEL_CELLS), "bold"), text)


def _bar(parts: Sequence[tuple[str, str, float]]) -> Text:
    """Return a bar: glyph, style and share of each part; what is there shows at least one cell."""
    text = Text("[")
    left = BAR_CELLS
    for glyph, style, share in parts:
        cells = min(left, max(round(BAR_CELLS * share), 1 if share > 0 else 0))
        text.append(glyph * cells, style)
        left -= cells
    return text.append("·" * left, "dim").append("]")


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
    return f"{int(seconds // 3600)}h{int(seconds % 3600 // 60):02d}m"
