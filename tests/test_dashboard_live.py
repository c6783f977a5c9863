"""The Live view against the record: what it drew, what it missed, and what it says of that.

Owns the proofs on a real server and a real browser that marks are rows, that a loss is told to the
record, and that cuts, sleep, a killed engine and a server that came back double and leave nothing.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from telemetry.records import KINDS
from tests import tiny
from tests.browser import CALM, until, watched_page
from tests.servers import Server, engine_pid, serving

WAIT_S = 30.0
STEPS = """() => {
    const {columns: c} = iterscope.store, steps = [];
    for (let i = c.first; i < c.count; i++) steps.push(c.step[c.slot(i)]);
    return steps;
}"""
DRAWN = """async ([from_ns, to_ns]) => {
    // Shows the window whole, and counts what reaches a canvas, each column once.
    const {store, view, live: {score}} = iterscope, {columns: c} = store;
    const {track} = score.lanes, paint = track.paint, seen = new Set();
    const kinds = ['prefill', 'decode', 'recompute'];
    const count = {prefill: 0, decode: 0, recompute: 0, first: 0, ended: 0};
    track.paint = (ctx, index, box) => {
        paint(ctx, index, box);
        if (seen.has(index)) return;
        seen.add(index);
        for (let k = 0; k < c.ops(index); k++) {
            const op = c.op(index, k), kind = c.opKind[op];
            if (c.opLane[op] < 0) continue;
            if (kind < 3) count[kinds[kind]]++;
            if (kind === 18) count.first++;
            if (kind === 19 || kind === 20 || kind === 22) count.ended++;
        }
    };
    while (view.zoom(0.8));
    for (let at = from_ns; at < to_ns; at += view.width / view.scale * 5e8) {
        view.centre(at);
        score.redraw();
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
    }
    view.centre(to_ns);
    score.redraw();
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    track.paint = paint;
    return count;
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("live") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give one server to the tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("shared")
    flags = ("--history", str(folder / "history"), "--max-num-seqs", "3")
    with serving(folder, model, *flags, parrot=True, beat_ms=2) as server:
        yield server


@contextmanager
def opened(browser: Browser, server: Server) -> Iterator[Page]:
    """Open the page; it must have said, raised and violated nothing when it is left."""
    with watched_page(browser) as page:
        page.goto(f"{server.url}/dashboard/")
        expect(page.locator("#link")).to_contain_text("live")
        yield page


def complete(server: Server, prompt: str, *, max_tokens: int) -> None:
    model = server.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)


def together(server: Server, count: int, *, max_tokens: int) -> None:
    """Send so many at once and wait for all."""
    threads = [
        threading.Thread(
            target=complete,
            args=(server, "words " * (3 * i + 1)),
            kwargs={"max_tokens": max_tokens},
        )
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


def sql(server: Server, query: str) -> list[list[Any]]:
    answer = httpx.post(f"{server.url}/telemetry/sql", json={"sql": query}, timeout=20)
    assert answer.status_code == 200, answer.text
    rows: list[list[Any]] = answer.json()["rows"]
    return rows


def newest_step(server: Server) -> int:
    [[step]] = sql(server, "select max(step) from iteration")
    return int(step)


def wait_newest(page: Page, server: Server) -> None:
    """Wait until the page has the newest iteration that there is."""
    step = newest_step(server)
    until(page, f"(({STEPS})().at(-1) ?? 0) >= {step}")


def head(server: Server) -> int:
    """Return how many records this run has published."""
    with httpx.stream("GET", f"{server.url}/telemetry/stream", timeout=WAIT_S) as answer:
        line = next(line for line in answer.iter_lines() if line.startswith("id:"))
    return int(line.rpartition(".")[2])


def test_what_is_drawn_is_what_sql_has_also_from_before_the_page_was_opened(
    browser: Browser, server: Server
) -> None:
    together(server, 4, max_tokens=12)
    with opened(browser, server) as page:
        wait_newest(page, server)
        together(server, 5, max_tokens=12)
        wait_newest(page, server)
        [[ended, firsts]] = sql(
            server, "select count(*), count(first_token_at_ns) from request_end"
        )
        until(page, f"iterscope.store.ended.length === {ended}")
        [[first, last]] = sql(server, "select min(begin_at_ns), max(end_at_ns) from iteration")
        drawn = page.evaluate(DRAWN, [first, last])
        [[slices, decodes]] = sql(
            server,
            "select (select count(*) from slice), sum(decode_tokens)::bigint from iteration",
        )
        assert drawn["prefill"] + drawn["decode"] + drawn["recompute"] == slices
        assert drawn["decode"] == decodes
        assert (drawn["ended"], drawn["first"]) == (ended, firsts)
        assert ended >= 9
        assert page.evaluate("iterscope.store.lostHere") == 0


def test_a_loss_is_told_to_the_record_and_dismissed(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    ring = 16
    flags = ("--ring-records", str(ring), "--history", str(tmp_path / "history"))
    with (
        serving(tmp_path, model, *flags, parrot=True) as server,
        opened(browser, server) as page,
    ):
        complete(server, "before", max_tokens=4)
        until(page, "iterscope.store.ended.length === 1")
        page.evaluate("iterscope.source.close()")
        at = page.evaluate("iterscope.source.seq")
        complete(server, "while it is away", max_tokens=60)
        least = head(server) - ring - at
        page.evaluate("iterscope.source.open()")
        until(page, "iterscope.store.lostHere > 0")
        lost = page.evaluate("iterscope.store.lostHere")
        assert 20 < least <= lost <= head(server) - ring - at
        banner = page.locator("#banner")
        expect(banner).to_contain_text(f"{lost} records lost")
        expect(page.locator("#link")).to_contain_text(f"{lost} lost")
        between = f"where seq > {at} and seq <= {at + lost}"
        counts = [f"select count(*) as n from {name} {between}" for name in KINDS]
        # So small a ring loses records for the history too, which says which.
        missed = f"""select coalesce(sum(least(to_seq, {at + lost}) - greatest(from_seq, {at + 1})
            + 1), 0) as n from telemetry_lost where to_seq > {at} and from_seq <= {at + lost}"""
        counted = " union all ".join([*counts, missed])
        assert sql(server, f"select sum(n)::bigint from ({counted})") == [[lost]]
        page.get_by_role("button", name="Dismiss").click()
        expect(banner).to_be_hidden()
        complete(server, "after", max_tokens=4)
        until(page, "!iterscope.store.live.size")
        expect(banner).to_be_hidden()


def test_cuts_and_a_sleep_double_and_miss_nothing(browser: Browser, server: Server) -> None:
    """Reported of others: a page that reconnects gets all again and shows each tick twice."""
    with opened(browser, server) as page:
        for _ in range(3):
            complete(server, "a cut follows", max_tokens=6)
            page.evaluate("iterscope.source.close()")
            complete(server, "while it is cut", max_tokens=6)
            page.evaluate("iterscope.source.open()")
        page.evaluate("iterscope.sleep()")
        complete(server, "while it sleeps", max_tokens=30)
        page.evaluate("iterscope.seen(true)")
        expect(page.locator("#link")).to_contain_text("live")
        page.evaluate("() => {const t = performance.now(); while (performance.now() < t + 500);}")
        complete(server, "awake", max_tokens=6)
        wait_newest(page, server)
        steps = page.evaluate(STEPS)
        assert steps == [row[0] for row in sql(server, "select step from iteration order by 1")]
        until(page, "!iterscope.store.live.size")
        ended = "iterscope.store.ended.map((r) => [r.id, r.output])"
        assert page.evaluate(ended) == sql(
            server, "select request, output_tokens from request_end order by seq"
        )
        expect(page.locator("#link")).to_contain_text("0 lost")
        until(page, "Math.abs(iterscope.view.right - iterscope.store.columns.newestNs) < 3e9")


def test_seven_tabs_of_one_browser_have_room(browser: Browser, server: Server) -> None:
    """Reported of others: a browser has six connections a server, and a stream holds one."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(CALM)
    tabs = []
    for _ in range(7):
        page = context.new_page()
        page.goto(f"{server.url}/dashboard/")
        expect(page.locator("#link")).to_contain_text("live")
        tabs.append(page)
        if len(tabs) < 7:
            page.evaluate("iterscope.sleep()")  # as when it is out of sight for a while
    [[ended]] = sql(server, "select count(*) from request_end")
    complete(server, "for all tabs", max_tokens=8)
    until(tabs[-1], f"iterscope.store.ended.length === {ended + 1}")
    tabs[-1].evaluate("iterscope.sleep()")
    tabs[0].evaluate("iterscope.seen(true)")
    until(tabs[0], f"iterscope.store.ended.length === {ended + 1}")
    context.close()


def test_a_killed_engine_leaves_nobody_waiting_on_the_page(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    with (
        serving(tmp_path, model, "--max-num-seqs", "1", parrot=True, beat_ms=5) as server,
        opened(browser, server) as page,
    ):
        crowd = threading.Thread(target=together, args=(server, 24), kwargs={"max_tokens": 400})
        crowd.start()
        waiting = page.locator(".panel", has_text="Waiting")
        until(page, "iterscope.store.present().waiting > 14")
        expect(page.locator(".beyond")).to_contain_text("more wait")
        expect(waiting).to_contain_text("rows full")
        os.kill(engine_pid(server), signal.SIGKILL)
        crowd.join(WAIT_S)
        expect(waiting).to_contain_text("Nobody waits")
        expect(page.locator(".beyond")).to_be_hidden()
        expect(page.locator(".number", has_text="Queue")).to_contain_text(re.compile("0 *waiting"))
        until(page, "iterscope.store.engines > 0 && !iterscope.store.fault")
        expect(page.locator("#banner")).to_be_hidden()
        complete(server, "a new engine", max_tokens=4)
        until(page, "iterscope.store.ended.at(-1)?.output === 4")


def test_a_server_that_comes_back_leaves_nothing_of_the_old_run_on_the_page(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    flags = ("--max-num-seqs", "1")
    with (
        serving(tmp_path, model, *flags, parrot=True, beat_ms=5) as server,
        opened(browser, server) as page,
    ):
        banner, numbers = page.locator("#banner"), page.locator(".numbers")
        expect(page.get_by_text("Ready. No request has come yet.")).to_be_visible()
        crowd = threading.Thread(target=attempt, args=(server, 24))
        crowd.start()
        expect(page.locator(".beyond")).to_contain_text("more wait")
        server.stop(signal.SIGKILL)
        crowd.join(WAIT_S)
        expect(banner).to_contain_text("Disconnected")
        expect(banner).to_contain_text("Last record: step ")
        expect(page.locator(".verdict")).to_contain_text("Unknown")
        expect(numbers).to_have_class(re.compile("stale"))
        port = server.url.rpartition(":")[2]
        with serving(tmp_path, model, "--port", port, parrot=True) as again:
            assert again.url == server.url
            expect(banner).to_contain_text("The server restarted")
            expect(banner).to_contain_text("unknown")
            until(page, "iterscope.store.run !== null && iterscope.store.restarts === 1")
            assert page.evaluate("[iterscope.store.ended.length, iterscope.store.live.size]") == [
                0,
                0,
            ], "no ghost"
            expect(page.locator(".beyond")).to_be_hidden()
            expect(page.locator(".waiter:visible")).to_have_count(0)
            expect(numbers).not_to_have_class(re.compile("stale"))
            expect(page.get_by_text("Ready. No request has come yet.")).to_be_visible()
            complete(again, "after", max_tokens=4)
            until(page, "iterscope.store.ended.length === 1")
            assert page.evaluate(STEPS)[0] == 1
            page.get_by_role("button", name="Dismiss").click()
            expect(banner).to_be_hidden()


def attempt(server: Server, count: int) -> None:
    """Send a crowd to a server that will be killed."""

    def send(number: int) -> None:
        try:
            complete(server, "words " * number, max_tokens=400)
        except httpx.TransportError:
            return  # the server was killed

    threads = [threading.Thread(target=send, args=(i,)) for i in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)


def test_a_clock_that_is_wrong_by_a_day_changes_nothing(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(CALM)
    page.add_init_script("const now = Date.now; Date.now = () => now() + 86_400_000;")
    page.goto(f"{server.url}/dashboard/")
    expect(page.locator("#link")).to_contain_text("live")
    [[before]] = sql(server, "select count(*) from request_end")
    until(page, f"iterscope.store.ended.length === {before}")
    together(server, 3, max_tokens=20)
    until(page, f"iterscope.store.ended.length === {before + 3}")
    until(page, "Math.abs(iterscope.view.right - iterscope.store.columns.newestNs) < 3e9")
    expect(page.locator(".number", has_text="Ended")).to_contain_text(re.compile(r"[1-9]\d* *in"))
    context.close()
