"""The Post-mortem view in a real browser: the past as it was, and a link that says so.

Owns the proofs that a window shows exactly the rows that SQL returns for it, losses included, that
questions, lints, SQL and recorded files work from the page, that what is too much is said, and that
the view is its address: another browser opens the same.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests import samples, tiny
from tests.api import bring, complete, ids
from tests.browser import until, visit, watched_page
from tests.recordings import placed, write_file
from tests.servers import Server, serving
from tests.sick_runs import preemption_thrash

PAST = "iterscope.router.page.past"
DRAWN = f"document.querySelector('.past')?.dataset.state === 'drawn' && {PAST}.store.columns.count"
PICTURE = f"""() => {{
    const {{store, view}} = {PAST}, {{columns: c}} = store;
    const found = {{iterations: c.count - c.first, rows: 0, slices: 0, prefill: 0, decode: 0}};
    for (let i = c.first; i < c.count; i++) {{
        const s = c.slot(i);
        found.rows += c.rows[s];
        found.prefill += c.prefill_tokens[s];
        found.decode += c.decode_tokens[s];
        for (let k = 0; k < c.ops(i); k++) found.slices += c.opKind[c.op(i, k)] <= 2;
    }}
    return {{...found, lost: store.lostHere, ended: store.ended.map((r) => r.id),
        left: Math.round(view.left), right: Math.round(view.right)}};
}}"""
PAINTED = """() => [...document.querySelectorAll('.score canvas')].reduce((sum, canvas) => {
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let marked = 0;
    for (let i = 3; i < data.length; i += 4) marked += data[i] > 127;
    return sum + marked;
}, 0)"""
DONE = f"""() => {{
    // What each step drew of whom: slices by kind, and who stood preempted.
    const {{columns: c}} = {PAST}.store, steps = {{}};
    for (let i = c.first; i < c.count; i++) {{
        const found = [];
        for (let k = 0; k < c.ops(i); k++) {{
            const op = c.op(i, k), kind = c.opKind[op];
            if (kind <= 2 || kind === 6) found.push([kind, c.opRequest[op]]);
        }}
        steps[c.step[c.slot(i)]] = found.sort((a, b) => a[1] - b[1]);
    }}
    return steps;
}}"""
HALF = """() => {
    const {page} = iterscope.router, [from, to] = page.window;
    page.choose([from, (from + to) / 2], true);
}"""
HELD = """SELECT count(*), sum(len(requests))::BIGINT, sum(prefill_tokens)::BIGINT,
  sum(decode_tokens)::BIGINT FROM iteration WHERE end_at_ns > $1 AND begin_at_ns < $2"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("post-mortem")
    flags = (f"--history={folder / 'history'}", "--max-num-seqs=4")
    with serving(folder, tiny.write(folder / "tiny"), *flags, parrot=True) as running:
        for number in range(6):
            complete(running, {"prompt": ids(20 + number), "max_tokens": 24})
        yield running


def sql(server: Server, text: str, *given: int, file: str | None = None) -> list[list[Any]]:
    path = f"/telemetry/incidents/{file}/sql" if file else "/telemetry/sql"
    answer = server.post(path, {"sql": text, "parameters": given})
    assert answer.status_code == 200, answer.text
    rows: list[list[Any]] = answer.json()["rows"]
    return rows


# ---- the past window


def test_a_window_shows_exactly_what_sql_returns_and_another_browser_the_same(
    page: Page, browser: Browser, server: Server
) -> None:
    [[run, started_us]] = sql(server, "SELECT run_id, started_unix_us FROM run")
    [[from_ns, to_ns]] = sql(
        server,
        "SELECT quantile_disc(begin_at_ns, 0.3), quantile_disc(end_at_ns, 0.7) FROM iteration",
    )
    from_us, to_us = started_us + from_ns // 1000, started_us + to_ns // 1000
    visit(page, server, "#/post-mortem")
    until(page, DRAWN)
    assert f"run={run}" in page.url, "an address that named nothing is made whole"
    page.evaluate(f"iterscope.router.page.choose([{from_us}, {to_us}], true)")
    # The window on the wall clock has microseconds.
    begin, end = ((us - started_us) * 1000 for us in (from_us, to_us))
    [[steps, rows, prefill, decode]] = sql(server, HELD, begin, end)
    assert 10 < steps < 150
    until(page, f"{PAST}.store.columns.count === {steps}")
    until(page, f"({PAINTED})() > 100")
    seen = page.evaluate(PICTURE)
    assert [seen["iterations"], seen["rows"], seen["slices"]] == [steps, rows, rows]
    assert [seen["prefill"], seen["decode"]] == [prefill, decode]
    with watched_page(browser) as other:
        other.goto(page.url)
        until(other, f"({DRAWN}) === {steps}")
        assert other.evaluate(PICTURE) == seen


def test_the_window_is_chosen_by_pointer_and_by_keys(page: Page, server: Server) -> None:
    visit(page, server, "#/post-mortem")
    until(page, DRAWN)
    strip = page.locator(".range-plane")
    box = strip.bounding_box()
    assert box
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    until(page, "iterscope.router.page.state.from_us > iterscope.router.page.extent[0]")
    before = page.evaluate("[...iterscope.router.page.window]")
    strip.focus()
    page.keyboard.press("ArrowLeft")
    until(page, f"iterscope.router.page.window[0] < {before[0]}")
    page.keyboard.press("-")
    until(
        page,
        "iterscope.router.page.window[1] - iterscope.router.page.window[0]"
        f" < {0.6 * (before[1] - before[0])} + 20e3",
    )
    assert strip.get_attribute("aria-valuetext")
    until(page, DRAWN)
    page.locator("main").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".hair")).to_be_visible()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".card")).to_contain_text("request_id")


def test_a_recorded_file_is_brought_and_its_losses_are_holes(
    page: Page, server: Server, tmp_path: Path
) -> None:
    path = write_file(tmp_path / "sick.duckdb", placed(preemption_thrash(), "sick"))
    with duckdb.connect(path) as connection:
        [[first, last]] = connection.execute(
            "SELECT quantile_disc(seq, 0.5), quantile_disc(seq, 0.5) + 3 FROM iteration"
        ).fetchall()
        for table in ("iteration", "request_start", "request_end"):
            connection.execute(f"DELETE FROM {table} WHERE seq BETWEEN {first} AND {last}")
        connection.execute(f"INSERT INTO telemetry_lost VALUES ('sick', 1, {first}, {last}, 4)")
    visit(page, server, "#/post-mortem")
    page.get_by_label("A recorded file").set_input_files(path)
    until(page, "iterscope.router.page.state.file?.endsWith('-sent.duckdb')")
    until(page, DRAWN)
    expect(page.locator(".past-note")).to_contain_text("4 records never reached the history")
    page.get_by_role("button", name="2 h").click()
    until(page, f"{PAST}.store.lostHere === 4")
    expect(page.locator('[data-lint="bad"]', has_text="Preemption thrash")).to_be_visible()
    expect(page.locator('[data-lint="good"]', has_text="Graph misses")).to_be_visible()
    file = page.evaluate("iterscope.router.page.state.file")
    seen = page.evaluate(PICTURE)
    [[steps, rows]] = sql(
        server, "SELECT count(*), sum(len(requests))::BIGINT FROM iteration", file=file
    )
    assert [seen["iterations"], seen["rows"]] == [steps, rows]
    assert page.evaluate(f"{PAST}.store.columns.hole.some((hole) => hole)")


def test_who_was_preempted_before_a_window_is_told_apart_in_it(
    page: Page, server: Server, tmp_path: Path
) -> None:
    file = bring(server, write_file(tmp_path / "t.duckdb", placed(preemption_thrash(), "thrash")))
    visit(page, server, f"#/post-mortem?file={file}")
    until(page, DRAWN)
    page.get_by_role("button", name="2 h").click()
    [[steps]] = sql(server, "SELECT count(*) FROM iteration", file=file)
    until(page, f"{PAST}.store.columns.count === {steps}")
    whole = page.evaluate(DONE)
    [[began, ended]] = sql(
        server,
        "SELECT min(i.begin_at_ns // 1000), max(i.end_at_ns // 1000) + 1 FROM iteration i",
        file=file,
    )
    [[zero]] = sql(server, "SELECT started_unix_us FROM run", file=file)
    kinds: set[int] = set()
    for share in (0.25, 0.4, 0.55, 0.7):
        at = zero + round(began + share * (ended - began))
        page.evaluate(f"iterscope.router.page.choose([{at}, {zero + ended}], true)")
        until(page, f"{PAST}.store.columns.count < {steps} && ({DRAWN})")
        steps = page.evaluate(f"{PAST}.store.columns.count")
        part = page.evaluate(DONE)
        assert part == {step: whole[step] for step in part}
        kinds |= {kind for found in part.values() for kind, _ in found}
    assert {2, 6} <= kinds, "some computed again, some stood preempted"


def test_what_is_too_much_for_a_picture_is_said_and_can_be_narrowed(
    page: Page, server: Server, tmp_path: Path
) -> None:
    steps = 13_000
    records = [samples.run(), samples.start(1)]
    records += [
        samples.iteration(step, [1], begin_at_ns=step * 10**6, end_at_ns=(step + 1) * 10**6)
        for step in range(1, steps + 1)
    ]
    file = bring(server, write_file(tmp_path / "long.duckdb", placed(records, "long")))
    [[begin, end]] = sql(
        server,
        "SELECT any_value(started_unix_us), any_value(started_unix_us) + max(end_at_ns) // 1000"
        " FROM run, iteration",
        file=file,
    )
    visit(page, server, f"#/post-mortem?file={file}")
    until(page, "iterscope.router.page.run")
    page.evaluate(f"iterscope.router.page.choose([{begin}, {end}], true)")
    message = page.locator(".past-message")
    expect(message).to_contain_text("more than one picture can")
    expect(message).to_contain_text("13,000 iterations")
    page.get_by_role("button", name="its end").click()
    until(page, DRAWN)
    seen = page.evaluate(PICTURE)
    assert 5_000 < seen["iterations"] <= 12_000
    assert seen["rows"] == seen["slices"] == seen["iterations"]


def test_states_without_a_picture_are_designed(page: Page, server: Server) -> None:
    visit(page, server, "#/post-mortem?file=nobody.duckdb")
    expect(page.get_by_text("The record could not be read.")).to_be_visible()
    page.get_by_role("button", name=re.compile("This server.s history")).click()
    until(page, DRAWN)
    page.route("**/telemetry/sql", lambda route: route.abort())
    page.evaluate(HALF)
    expect(page.get_by_text("The window could not be read.")).to_be_visible()
    page.unroute("**/telemetry/sql")
    page.get_by_role("button", name="Try again").click()
    until(page, DRAWN)


# ---- questions


def test_a_named_query_takes_parameters_and_stands_in_the_address(
    page: Page, server: Server
) -> None:
    visit(page, server, "#/post-mortem?show=query&q=slowest_requests&p.requests=4")
    rows = page.locator(".answer tbody tr")
    expect(rows).to_have_count(4)
    page.get_by_label("requests").fill("2")
    page.get_by_label("requests").press("Enter")
    expect(rows).to_have_count(2)
    assert "p.requests=2" in page.url
    page.reload()
    expect(rows).to_have_count(2)
    page.get_by_label("requests").fill("0")
    page.get_by_label("requests").press("Enter")
    expect(page.locator(".pm-status")).to_contain_text("requests is at least 1")
    page.get_by_role("button", name="Where the time of requests went").click()
    expect(page.locator(".plot canvas")).to_be_visible()
    expect(rows.first).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Slowest requests")).to_be_visible()
    page.get_by_label("requests").fill("1")
    page.get_by_label("requests").press("Enter")
    link = page.locator(".answer a").first
    expect(link).to_have_attribute("href", re.compile("^#/request/"))


def test_a_named_query_can_be_edited_as_sql(page: Page, server: Server) -> None:
    visit(page, server, "#/post-mortem?show=query&q=causes")
    expect(page.locator(".answer tbody tr").first).to_be_visible()
    before = page.locator(".answer tbody").inner_text()
    page.get_by_role("button", name="Edit as SQL").click()
    expect(page.get_by_role("heading", name="SQL", exact=True)).to_be_visible()
    until(page, "!document.querySelector('.console').ariaBusy")
    expect(page.locator(".answer tbody")).to_have_text(before, use_inner_text=True)


def test_the_sql_editor_completes_and_shows_where_an_error_is(page: Page, server: Server) -> None:
    visit(page, server, "#/post-mortem?show=query")
    editor = page.get_by_role("textbox", name="SQL")
    expect(page.locator(".answer tbody tr").first).to_be_visible()
    editor.fill("")
    editor.press_sequentially("SELECT step, prefill_tokens FROM itera")
    expect(page.get_by_role("option", name="iteration")).to_be_visible()
    editor.press("Tab")
    assert editor.input_value().endswith("FROM iteration")
    editor.press_sequentially("\nORDER BY nothing")
    editor.press("Escape")
    editor.press("Control+Enter")
    expect(page.locator(".pm-status")).to_contain_text("line 2, column 10")
    expect(page.locator(".editor mark")).to_have_text("nothing")
    editor.fill("SELECT step, prefill_tokens FROM iteration ORDER BY step LIMIT 5")
    editor.press("Control+Enter")
    expect(page.locator(".answer tbody tr")).to_have_count(5)
    expect(page.locator(".plot canvas")).to_be_visible()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="CSV").click()
    body = {"sql": editor.input_value(), "format": "csv"}
    assert waiting.value.path().read_bytes() == server.post("/telemetry/sql", body).content
    page.reload()
    expect(page.locator(".answer tbody tr")).to_have_count(5)


def test_what_an_answer_says_is_text(page: Page, server: Server) -> None:
    text = "SELECT '<img src=x onerror=alert(1)>' AS \"<b>\", NULL AS nothing, [1, 2] AS list"
    address = page_address(text)
    visit(page, server, address)
    cells = page.locator(".answer td")
    expect(cells).to_have_text(["<img src=x onerror=alert(1)>", "\u2013", "[1,2]"])


def page_address(text: str) -> str:
    return "#/post-mortem?" + str(httpx.QueryParams({"show": "query", "sql": text}))
