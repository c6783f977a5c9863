"""What is known of one request: found by any of its ids, in the bus's ring or in the history.

Owns Case and the two ways to gather one: `case_from_bus` goes through the ring in some ms, and
`case_from_history` asks a handful of SELECTs, each of them bounded. server/requests_api.py and
`iterscope explain` call them. Must never run on the event loop, nor read prompts: there are none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from telemetry.bus import Bus, Entry
from telemetry.explain import COUNTED, Model
from telemetry.explain_tiles import Tile, model_of, tile_of
from telemetry.records import (
    Delivery,
    Iteration,
    RequestCause,
    RequestEnd,
    RequestShare,
    RequestStart,
    StepModel,
    columns,
)
from telemetry.spans import Ask

MATCHES_MAX = 100
PAGE_ROWS = 1000
TILES_MAX, SLICES_MAX = 20_000, 1_000_000
"""How much of a life is read from the history: minutes. What lies beyond was told by the fold."""

NAMES_A_QUERY = 4000
UNTIL_NOW_NS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One sequence and the iterations of its life; `prior_step` came before the first of them.

    `matches` are the ids of all requests that the asked id names, newest first. `whole` says
    whether the iterations reach back to its arrival; `told` [ns by cause] is what was put on record
    of it. names and prompts are by request; `began_unix_us` is the wall clock at its run's zero.
    """

    run_id: str
    began_unix_us: int | None
    start: RequestStart
    end: RequestEnd | None
    delivery: Delivery | None
    share: RequestShare | None
    tiles: list[tuple[Tile, Model]]
    prior_step: int | None
    names: dict[int, str]
    prompts: dict[int, int]
    matches: list[str]
    whole: bool
    told: dict[str, int]


def case_from_bus(bus: Bus, asked: str) -> Case | None:
    """Return the latest request that `asked` names, from what the ring holds; None without any."""
    with bus.reader(bus.tail_snapshot().seq, label="explain") as reader:
        entries = reader.take(bus.capacity).entries
    starts = {start.request: start for start in bus.snapshot().live}
    ends: dict[int, RequestEnd] = {}
    deliveries: dict[int, Delivery] = {}
    shares: dict[int, RequestShare] = {}
    told: dict[int, dict[str, int]] = {}
    generations: dict[int, int] = {}
    for entry in entries:
        record = entry.record
        if isinstance(record, RequestStart):
            starts[record.request] = record
            generations[record.request] = entry.generation
        elif isinstance(record, RequestEnd):
            ends[record.request] = record
            generations.setdefault(record.request, entry.generation)
        elif isinstance(record, Delivery):
            deliveries[record.request] = record
        elif isinstance(record, RequestShare):
            shares[record.request] = record
        elif isinstance(record, RequestCause):
            told.setdefault(record.request, {})[record.cause] = record.ns
    for request in ends.keys() - starts.keys():
        starts[request] = _start_from(ends[request], deliveries.get(request))
    found = choose(asked, [(start, start.request in ends) for start in starts.values()])
    if found is None:
        return None
    start, matches = found
    end = ends.get(start.request)
    generation = generations.get(start.request, bus.generation)
    tiles, prior_step = _tiles_of(entries, start, end, generation)
    run = bus.snapshot().run
    return Case(
        run_id=bus.run_id,
        began_unix_us=run.started_unix_us if run else None,
        start=start,
        end=end,
        delivery=deliveries.get(start.request),
        share=shares.get(start.request),
        tiles=tiles,
        prior_step=prior_step,
        names={one.request: one.request_id for one in starts.values()},
        prompts={one.request: one.prompt_tokens for one in starts.values()},
        matches=matches,
        whole=prior_step is not None or (bool(tiles) and tiles[0][0].step == 1),
        told=told.get(start.request, {}),
    )


def choose(
    asked: str, known: Iterable[tuple[RequestStart, bool]]
) -> tuple[RequestStart, list[str]] | None:
    """Return the sequence that an id names, and all requests that it could mean, newest first.

    A sequence's own id comes first, then the id of an HTTP request (of its sequences the one that
    lives longest), then a client's id: the latest that carried it. `known` tells who has ended.
    """
    own, family, foreign = [], [], []
    for start, ended in known:
        if start.request_id == asked:
            own.append((ended, start))
        elif start.parent_id == asked:
            family.append((ended, start))
        elif start.external_id == asked:
            foreign.append((ended, start))
    if own:
        return own[-1][1], [asked]
    if family:
        return min(family, key=lambda one: (one[0], -one[1].request))[1], [asked]
    if not foreign:
        return None
    foreign.sort(key=lambda one: -one[1].request)
    ids = list(dict.fromkeys(start.parent_id or start.request_id for _, start in foreign))
    latest = [one for one in foreign if (one[1].parent_id or one[1].request_id) == ids[0]]
    start = min(latest, key=lambda one: (one[0], -one[1].request))[1]
    return start, ids[:MATCHES_MAX]


def _start_from(end: RequestEnd, delivery: Delivery | None) -> RequestStart:
    """Return as much of a start as its end tells: the ring has forgotten the start itself."""
    streamed = delivery is not None and delivery.first_write_at_ns != delivery.last_write_at_ns
    return RequestStart(
        request=end.request,
        request_id=end.request_id,
        external_id=end.external_id,
        parent_id=end.parent_id,
        tenant=end.tenant,
        arrived_at_ns=end.arrived_at_ns,
        prompt_tokens=end.prompt_tokens,
        max_tokens=end.output_tokens,
        priority=0,
        slo=None,
        stream=streamed,
    )


def _tiles_of(
    entries: Sequence[Entry], start: RequestStart, end: RequestEnd | None, generation: int
) -> tuple[list[tuple[Tile, Model]], int | None]:
    """Return the tiles of a life with the model in force at each, and the step before them."""
    model = COUNTED
    prior_step: int | None = None
    tiles: list[tuple[Tile, Model]] = []
    until_ns = UNTIL_NOW_NS if end is None else end.released_at_ns
    for entry in entries:
        if entry.generation != generation:
            continue
        record = entry.record
        if isinstance(record, StepModel):
            model = model_of(record)
        elif isinstance(record, Iteration) and record.begin_at_ns < until_ns:
            if record.end_at_ns > start.arrived_at_ns:
                tiles.append((tile_of(record), model))
            else:
                prior_step = record.step
    return tiles, prior_step


# ---- from the history


def case_from_history(ask: Ask, asked: str) -> Case | None:
    """Return the latest request that `asked` names, from SQL; None without any.

    Whatever `ask` raises goes through.
    """
    found = _find(ask, asked)
    if found is None:
        return None
    run_id, generation, began_unix_us, start, matches = found
    key: list[object] = [run_id, start.request]
    end = _one(ask, RequestEnd, "request_end", key)
    delivery = _one(ask, Delivery, "delivery", key)
    until_ns = UNTIL_NOW_NS if end is None else end.released_at_ns
    rows, all_of_it = _iterations(ask, [run_id, generation, start.arrived_at_ns, until_ns])
    prior_step = None
    if rows and rows[0][1] > 1:
        prior = ask(_PRIOR, [run_id, generation, rows[0][1] - 1])
        prior_step = prior.rows[0][0] if prior.rows else None
    tiles = _with_models(ask, rows, [run_id, generation])
    names, prompts = _named(ask, run_id, tiles)
    return Case(
        run_id=run_id,
        began_unix_us=began_unix_us,
        start=start,
        end=end,
        delivery=delivery,
        share=_one(ask, RequestShare, "request_share", key),
        tiles=tiles,
        prior_step=prior_step,
        names=names | {start.request: start.request_id},
        prompts=prompts,
        matches=matches,
        whole=all_of_it and (prior_step is not None or (bool(rows) and rows[0][1] == 1)),
        told=dict(ask(_TOLD, key).rows),
    )


_START_COLUMNS = [column.name for column in columns(RequestStart)]

_FIND = f"""
SELECT s.run_id, s.generation, r.began, {", ".join(f"s.{name}" for name in _START_COLUMNS)},
       e.request IS NOT NULL
FROM request_start s
JOIN (SELECT run_id, min(started_unix_us) AS began FROM run GROUP BY run_id) r USING (run_id)
LEFT JOIN request_end e ON e.run_id = s.run_id AND e.request = s.request
WHERE s.request_id = $1 OR s.parent_id = $1 OR s.external_id = $1
ORDER BY r.began DESC, s.request DESC LIMIT {PAGE_ROWS}"""

_TILES = f"""
SELECT seq, {", ".join(Tile._fields)} FROM iteration
WHERE run_id = $1 AND generation = $2 AND end_at_ns > $3 AND begin_at_ns < $4 AND seq > $5
ORDER BY seq LIMIT {PAGE_ROWS}"""

_REQUESTS = 1 + Tile._fields.index("requests")

_TOLD = "SELECT cause, ns FROM request_cause WHERE run_id = $1 AND request = $2"

_PRIOR = "SELECT step FROM iteration WHERE run_id = $1 AND generation = $2 AND step = $3"

_MODELS = """
SELECT seq, fixed, p, d, c, error FROM step_model
WHERE run_id = $1 AND generation = $2 AND seq < $4 AND seq >= coalesce((
  SELECT max(seq) FROM step_model WHERE run_id = $1 AND generation = $2 AND seq < $3), 0)
ORDER BY seq"""


def _find(ask: Ask, asked: str) -> tuple[str, int, int, RequestStart, list[str]] | None:
    places: dict[int, tuple[str, int, int]] = {}
    known: list[tuple[RequestStart, bool]] = []
    for row in ask(_FIND, [asked]).rows:
        start = RequestStart(**dict(zip(_START_COLUMNS, row[3:-1], strict=True)))
        if places and row[0] != next(iter(places.values()))[0]:
            break  # an earlier run: integers are unique in one run alone
        places[start.request] = (row[0], row[1], row[2])
        known.append((start, bool(row[-1])))
    found = choose(asked, reversed(known))
    if found is None:
        return None
    start, matches = found
    return *places[start.request], start, matches


def _one(ask: Ask, kind: type[Any], table: str, key: list[object]) -> Any:
    names = [column.name for column in columns(kind)]
    sql = f"SELECT {', '.join(names)} FROM {table} WHERE run_id = $1 AND request = $2 LIMIT 1"
    rows = ask(sql, key).rows
    return kind(**dict(zip(names, rows[0], strict=True))) if rows else None


def _iterations(ask: Ask, key: list[object]) -> tuple[list[list[Any]], bool]:
    """Return (seq, tile...) of a life's iterations, page by page, and whether these are all."""
    rows: list[list[Any]] = []
    slices = 0
    while len(rows) < TILES_MAX and slices < SLICES_MAX:
        page = ask(_TILES, [*key, rows[-1][0] if rows else -1])
        rows += page.rows
        slices += sum(len(row[_REQUESTS]) for row in page.rows)
        if not page.rows or not (page.truncated or len(page.rows) == PAGE_ROWS):
            return rows, True
    return rows, False


def _with_models(ask: Ask, rows: list[list[Any]], key: list[object]) -> list[tuple[Tile, Model]]:
    """Give each tile the model that was on record before it."""
    if not rows:
        return []
    fits = ask(_MODELS, [*key, rows[0][0], rows[-1][0]]).rows
    tiles: list[tuple[Tile, Model]] = []
    model, place = COUNTED, 0
    for seq, *facts in rows:
        while place < len(fits) and fits[place][0] < seq:
            fixed, p, d, c, error = fits[place][1:]
            model = Model(fixed, p, d, c, 1.0, error)
            place += 1
        tiles.append((Tile(*facts), model))
    return tiles


def _named(
    ask: Ask, run_id: str, tiles: Sequence[tuple[Tile, Model]]
) -> tuple[dict[int, str], dict[int, int]]:
    """Return the ids and prompt lengths of everybody in these tiles."""
    there: set[int] = set()
    for tile, _ in tiles:
        there.update(tile.requests)
        there.update(tile.preempted_beneficiaries)
        if tile.admission_blocker is not None:
            there.add(tile.admission_blocker)
    ids = sorted(there)
    names: dict[int, str] = {}
    prompts: dict[int, int] = {}
    for first in range(0, len(ids), NAMES_A_QUERY):
        some = ", ".join(map(str, ids[first : first + NAMES_A_QUERY]))
        for request, name, prompt in ask(
            "SELECT request, request_id, prompt_tokens FROM request_start "
            f"WHERE run_id = $1 AND request IN ({some})",
            [run_id],
        ).rows:
            names[request] = name
            prompts[request] = prompt
    return names, prompts
