"""The Compare view in a real browser: two sides, and what the server says changed between them.

Owns the proofs that the page shows the server's own comparison, that its address opens the same,
and that what somebody types stays theirs: a list that comes late, or a side that cannot be, takes
nothing away.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests import tiny
from tests.api import bring, complete, ids
from tests.browser import until, visit
from tests.noisy_runs import noisy_file
from tests.servers import Server, serving

DRAWN = "document.querySelector('.past')?.dataset.state === 'drawn'"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("compare")
    flags = (f"--history={folder / 'history'}", "--max-num-seqs=4")
    with serving(folder, tiny.write(folder / "tiny"), *flags, parrot=True) as running:
        for number in range(6):
            complete(running, {"prompt": ids(20 + number), "max_tokens": 24})
        yield running


def test_two_sides_are_compared_as_the_server_compares_them(
    page: Page, server: Server, tmp_path: Path
) -> None:
    files = [
        bring(server, noisy_file(tmp_path / f"{seed}.duckdb", seed, requests=60)) for seed in (5, 6)
    ]
    told = server.post("/telemetry/diff", {"a_file": files[0], "b_file": files[1]}).json()
    visit(page, server, f"#/compare?a.file={files[0]}&b.file={files[1]}")
    expect(page.locator(".figures").first.locator("tbody tr")).to_have_count(
        len(told["diff"]["figures"])
    )
    expect(page.locator(".cmp-side h2").first).to_contain_text("60 requests ended")
    shares = page.evaluate(
        "[...document.querySelectorAll('.cmp-falls tr')].map((row) =>"
        " ({name: row.cells[0].textContent, left: row.querySelector('i').style.left,"
        " width: row.querySelector('i').style.width}))"
    )
    assert [shares[0]["name"], shares[-1]["name"]] == ["A", "B"]
    ratio = float(shares[-1]["width"][:-1]) / float(shares[0]["width"][:-1])
    request = told["diff"]["request"]
    if shares[0]["left"] == "0%" and "begin at" not in page.locator(".cmp-falls").inner_text():
        assert ratio == pytest.approx(request["b"] / request["a"], rel=0.02)
    until(page, "Object.values(iterscope.router.page.pictures).every((p) => p.score.drawable)")
    page.get_by_role("button", name="Swap the sides").click()
    until(page, f"iterscope.router.page.sides.a.file === {json.dumps(files[1])}")
    assert f"b.file={files[0]}" in page.url
    page.locator(".cmp-side a").first.click()
    until(page, DRAWN)
    assert page.evaluate("iterscope.router.page.state.file") == files[1]


def test_a_list_that_comes_late_leaves_what_was_typed(
    page: Page, server: Server, tmp_path: Path
) -> None:
    name = bring(server, noisy_file(tmp_path / "late.duckdb", 7, requests=20))
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/telemetry/incidents", hold)
    try:
        visit(page, server, f"#/compare?b.file={name}")
        while not held:  # the test's own time limit ends it
            page.wait_for_timeout(20)
        page.get_by_label("Window or run of A").fill("last")
        held[0].continue_()
        files = page.get_by_label("Record of A").locator("option")
        expect(files.filter(has_text="sent").first).to_be_attached()
    finally:
        page.unroute("**/telemetry/incidents")
    expect(page.get_by_label("Window or run of A")).to_have_value("last")
    expect(page.get_by_label("Record of B")).to_have_value(name)


def test_sides_that_cannot_be_are_named(page: Page, server: Server) -> None:
    visit(page, server, "#/compare")
    expect(page.get_by_text("Two sides, and what changed from A to B")).to_be_visible()
    page.get_by_label("Window or run of A").fill("last")
    page.get_by_label("Window or run of B").fill("nobody")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("neither a file nor a run 'nobody'")
    assert "b=nobody" in page.url
    page.get_by_label("Window or run of B").fill("1h/now")
    page.get_by_label("Window or run of B").press("Enter")
    expect(page.locator(".verdict")).to_contain_text("A mean request took")
