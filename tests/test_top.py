"""`iterscope top`: these records, this text. What is known of a server, and how it is drawn.

Owns the proofs of server/watch.py, server/pace.py, server/top_picture.py and server/top_frame.py,
without a server; test_top_terminal.py has one, and a terminal.
"""

import json

import msgspec
import pytest
from rich.cells import cell_len

from server.event_stream import Event
from server.pace import FIRSTS_MAX, GAPS_MAX, TILES_MAX, Pace, Tile, percentiles
from server.top_frame import Link, frame
from server.top_picture import picture_of
from server.watch import Watch
from telemetry.bus import KIND_NAMES
from telemetry.records import Record
from tests import samples

MS = 10**6
QUIET = Link(away=None, notes=(), keys=False)


def hello(
    watch: Watch, *, run_id: str = "r1", lost: int | str = 0, live: tuple[Record, ...] = ()
) -> None:
    body = {
        "schema_version": 1,
        "run_id": run_id,
        "generation": 1,
        "run": samples.run(),
        "live": list(live),
        "lost": lost,
    }
    watch.take(Event("hello", msgspec.json.encode(body)), 0)


def take(watch: Watch, *records: Record, here_ns: int = 0) -> None:
    for record in records:
        watch.take(Event(KIND_NAMES[type(record)], msgspec.json.encode(record)), here_ns)


def step(number: int, requests: list[int], **changed: object) -> Record:
    """Return an iteration of 10 ms in which the rows are decodes unless told otherwise."""
    begin = number * 10 * MS
    return samples.iteration(
        number, requests, **{"begin_at_ns": begin, "end_at_ns": begin + 10 * MS} | changed
    )


def text(
    watch: Watch, width: int | None = 100, height: int | None = None, link: Link = QUIET
) -> str:
    picture = picture_of(watch, "http://here", 0)
    return "\n".join(line.plain.rstrip() for line in frame(picture, link, width, height))


def busy() -> Watch:
    """Return a watch of one that decodes, one that is read, and two that wait behind the first."""
    watch = Watch()
    hello(watch)
    take(
        watch, *(samples.start(n, prompt_tokens=8 * n, arrived_at_ns=n * MS) for n in (1, 2, 3, 4))
    )
    rows = {"start_positions": [0, 0], "token_counts": [8, 4], "kv_block_counts": [1, 1]}
    take(watch, step(1, [1, 2], admitted=[1, 2], admitted_cached_tokens=[0, 0], **rows))
    rows = {"start_positions": [8, 4], "token_counts": [1, 4], "kv_block_counts": [1, 1]}
    stop = {"admission_stop": "kv", "admission_blocker": 3, "waiting": 2, "kv_blocks_used": 40}
    take(watch, step(2, [1, 2], prefill_tokens=4, decode_tokens=1, **rows, **stop))
    return watch


def test_a_frame_says_who_runs_who_waits_and_why() -> None:
    lines = text(busy()).splitlines()
    assert lines[0] == "iterscope top tiny at http://here  up 0.0 s  run r1, engine 1"
    assert lines[2] == (
        "batch    [█▒··················] 2 of 64 rows: prefill 4 + decode 1 of 512 tokens"
    )
    assert lines[3] == "kv       [████████············] 40 % used, 0 % cached of 100 blocks"
    assert lines[4] == "queue    2 running, 2 waiting; held by kv at req-3  last step 2"
    cells = [line.split() for line in lines]
    assert ["req-1", "default", "decode", "8", "2/16", "1", "0.0", "s", "10.0", "ms"] in cells
    assert ["req-2", "default", "pre", "50", "%", "16", "0/16", "1", "0.0", "s", "-"] in cells
    assert ["req-3", "default", "24", "0.0", "s", "kv"] in cells
    assert ["req-4", "default", "32", "0.0", "s", "kv,", "behind", "req-3"] in cells


def test_every_width_and_height_is_kept() -> None:
    watch = busy()
    picture = picture_of(watch, "http://here", 0)
    for width in (1, 10, 40, 80, 200):
        for height in (1, 5, 12, 24, 60):
            lines = frame(picture, Link(away=None, notes=(), keys=True), width, height)
            assert len(lines) <= height
            assert all(cell_len(line.plain) <= width for line in lines)
    assert lines[-1].plain == "q quits"
    assert len(lines) == 60


def test_more_requests_than_lines_are_counted() -> None:
    watch = Watch()
    hello(watch, live=tuple(samples.start(n) for n in range(40)))
    assert "waiting 40" in text(watch)
    cut = text(watch, height=20).splitlines()
    assert len(cut) == 20
    assert cut[-1] == "and 32 more"


def test_what_strangers_name_themselves_stays_text() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\r\nrunning 99\u202e\u2028\x9b31m"
    watch = Watch()
    hello(watch)
    take(watch, samples.start(1, tenant=hostile, external_id=hostile))
    take(
        watch,
        samples.run(model=hostile),
        step(1, [1], passed_over=[1], passed_over_reasons=[hostile]),
    )
    take(watch, samples.rejection(), samples.fault(where=hostile, error=hostile))
    notes = [("00:00:00", note) for _, note in watch.notes]
    drawn = text(watch, 200, link=Link(away=hostile, notes=notes, keys=False))
    assert "\\x1b[2J" in drawn
    assert "\\u202e" in drawn
    assert all(one.isprintable() or one == "\n" for one in drawn)
    assert drawn.count("\n") == text(watch, 200).count("\n") + len(notes)


def test_wide_names_do_not_push_columns() -> None:
    watch = Watch()
    hello(watch)
    take(
        watch,
        samples.start(1, tenant="日本語のテナント", external_id="e"),
        step(1, [1], token_counts=[8]),
    )
    take(watch, samples.start(2), step(2, [1, 2]))
    rows = [line for line in text(watch).splitlines() if "/16" in line]
    assert len({cell_len(line[: line.index("/16")]) for line in rows}) == 1


def test_loss_is_counted_and_the_state_begins_anew_from_the_hello() -> None:
    watch = busy()
    watch.take(Event("lost", b'{"from":1,"to":7,"count":7,"by_kind":null}'), 0)
    hello(watch, live=(samples.start(2), samples.start(9)))
    take(watch, step(3, [2], lost_before=5))
    assert (watch.lost, watch.engine_lost) == (7, 5)
    assert set(watch.requests) == {2, 9}
    assert "7 records lost, 5 iterations dropped" in text(watch)
    assert [note for _, note in watch.notes] == [
        "7 records were lost on the way here",
        "the engine dropped 5 iterations unsent",
    ]


def test_another_life_of_the_server_starts_from_nothing() -> None:
    watch = busy()
    hello(watch, run_id="r2", lost="unknown")
    assert not watch.requests
    assert watch.last is None
    assert [note for _, note in watch.notes] == ["the server was started anew: run r2"]
    assert "run r2" in text(watch)
    take(watch, samples.run())
    assert "another engine was started: generation 2" in watch.notes[-1][1]


def test_a_preempted_request_waits_and_comes_back_to_recompute() -> None:
    watch = busy()
    lost = {
        "preempted": [1],
        "preempted_causes": ["kv"],
        "preempted_blocks": [1],
        "preempted_lost_tokens": [9],
        "preempted_beneficiaries": [2],
    }
    take(watch, step(3, [2], start_positions=[8], token_counts=[4], admission_stop="kv", **lost))
    assert "preempted (kv); kv" in text(watch)
    assert watch.preemptions == 1
    take(watch, step(4, [1], start_positions=[0], token_counts=[9], admitted=[1]))
    assert watch.phases == ["recompute"]
    assert watch.requests[1].output == 2, "tokens that are computed again are no output"


def test_percentiles_are_of_gaps_between_tokens_and_of_deliveries() -> None:
    watch = Watch()
    hello(watch)
    take(watch, samples.start(1, prompt_tokens=1))
    for number in range(1, 12):
        take(watch, step(number, [1], start_positions=[number - 1], token_counts=[1]))
    take(watch, samples.delivery(1, received_at_ns=0, first_write_at_ns=30 * MS))
    picture = picture_of(watch, "", 0)
    assert picture.itl is not None
    assert picture.ttft is not None
    assert (picture.itl.p50_ms, picture.itl.count) == (10.0, 10)
    assert (picture.ttft.p99_ms, picture.ttft.count) == (30.0, 1)
    assert picture.rates.output_tokens_per_s == pytest.approx(11)
    assert percentiles(range(1, 101)) is not None


def test_rates_fall_when_nothing_happens() -> None:
    watch = busy()
    watch.opened(None)
    take(watch, step(3, [1]), here_ns=40 * MS)
    for later_s, most in ((1, 3.0), (5, 0.7), (20, 0.0)):
        rates = picture_of(watch, "", later_s * 1000 * MS).rates
        assert rates.iterations_per_s <= most
        assert 0.0 <= rates.busy_share <= 1.0


def test_the_servers_clock_is_taken_from_its_own_words() -> None:
    """GIVEN an idle server and old records, THEN its Date says how long ago they are."""
    watch = Watch()
    started_s = samples.run().started_unix_us / 1e6
    watch.opened(started_s + 60)
    hello(watch)
    take(watch, samples.start(1, arrived_at_ns=0), step(1, [1]))
    assert watch.now_ns(0) == 60 * 1000 * MS
    assert picture_of(watch, "", 0).running[0].age_s == 60.0


def test_memory_is_bounded_however_long_it_looks() -> None:
    pace = Pace()
    for number in range(3 * TILES_MAX):
        pace.add(Tile(begin_at_ns=number, end_at_ns=number + 1, prefill_tokens=1, output_tokens=1))
        pace.gaps_ns.append(1)
        pace.firsts_ns.append(1)
    assert (len(pace.gaps_ns), len(pace.firsts_ns)) == (GAPS_MAX, FIRSTS_MAX)
    assert pace.rates(3 * TILES_MAX).iterations_per_s == TILES_MAX
    watch = Watch()
    hello(watch)
    for number in range(1000):
        take(watch, samples.start(number), samples.end(number), samples.fault())
    assert not watch.requests
    assert len(watch.notes) == 3


def test_json_has_every_figure() -> None:
    body = json.loads(msgspec.json.encode(picture_of(busy(), "http://here", 0)))
    assert body["running"][0]["request_id"] == "req-1"
    assert body["waiting"][1] == {
        "request_id": "req-4",
        "external_id": None,
        "tenant": "default",
        "prompt_tokens": 32,
        "output_tokens": 0,
        "age_s": pytest.approx(0.026),
        "reason": "kv",
        "behind": "req-3",
        "preempted": None,
    }
    assert body["seen"] == {
        "ended": {},
        "rejected": 0,
        "preemptions": 0,
        "faults": 0,
        "records_lost": 0,
        "iterations_dropped": 0,
    }
