"""The live page in a real browser, over a real server with the tiny model.

What the page says is compared with what the history holds: the page must join, count, finish and
recover. Node's own tests of the page's modules run here too, so that pytest alone tells the truth.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests import tiny
from tests.browser import until
from tests.servers import Server, serving

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 30.0
WAIT_MS = WAIT_S * 1000
PAINTED = """() => {
    // Pixels of the lanes near the hues of prefill and decode; edges of thin marks are blended.
    const css = getComputedStyle(document.documentElement);
    const count = {prefill: 0, decode: 0};
    const hues = Object.keys(count).map((name) => {
        const hex = css.getPropertyValue('--' + name).trim();
        return [name, [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16))];
    });
    for (const canvas of document.querySelectorAll('.score .scroller canvas')) {
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const context = copy.getContext('2d', {willReadFrequently: true});
        context.drawImage(canvas, 0, 0);
        const {data} = context.getImageData(0, 0, copy.width, copy.height);
        for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3] < 128) continue;
            for (const [name, hue] of hues) {
                if (hue.every((v, at) => Math.abs(v - data[i + at]) < 32)) count[name]++;
            }
        }
    }
    return count;
}"""
FIGURES = """() => {
    const {store} = iterscope, {columns: c} = store;
    const sum = (column) => {
        let total = 0;
        for (let i = c.first; i < c.count; i++) total += column[c.slot(i)];
        return total;
    };
    return {
        iterations: c.count,
        prefill: sum(c.prefill_tokens),
        decode: sum(c.decode_tokens),
        rows: Math.max(...c.rows),
        outputs: store.ended.map((r) => [r.id, r.output, r.end.finish]),
    };
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("page") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give one server to all tests: none asks who came before it."""
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, model, "--history", str(folder / "history")) as server:
        yield server


def open_page(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/dashboard/")
    expect(page.locator("#link")).to_contain_text("live", timeout=WAIT_MS)


def send(page: Page, prompt: str, *, max_tokens: int) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("max tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Send", exact=True).click()


def wait_ended(page: Page, count: int) -> None:
    until(page, f"iterscope.store.ended.length >= {count} && !iterscope.store.live.size")


def sql(server: Server, query: str) -> list[list[Any]]:
    answer = httpx.post(f"{server.url}/telemetry/sql", json={"sql": query}, timeout=20)
    assert answer.status_code == 200, answer.text
    rows: list[list[Any]] = answer.json()["rows"]
    return rows


def test_modules_of_the_page() -> None:
    files = sorted(str(file) for file in (ROOT / "dashboard" / "tests").glob("*.test.js"))
    assert files
    done = subprocess.run(
        ["node", "--test", *files], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_prompt_joins_the_batch_and_the_page_counts_as_the_history_does(
    page: Page, server: Server
) -> None:
    open_page(page, server)
    before = len(page.evaluate(FIGURES)["outputs"])
    send(page, "Hello there", max_tokens=24)
    wait_ended(page, before + 1)
    status = page.locator(".try-status")
    expect(status).to_have_text(re.compile(r"^#\d+ · (stop|length) · \d+ tokens? · first after"))
    mine = "iterscope.store.ended.at(-1).id"
    assert page.evaluate(f"iterscope.selected === {mine}"), "its own lane is lit"
    expect(page.locator(".card")).to_contain_text("chatcmpl-")

    page.get_by_role("button", name="Send 16 at once").click()
    wait_ended(page, before + 17)
    ours = page.evaluate(FIGURES)
    [[iterations, prefill, decode]] = sql(
        server,
        "select count(*), sum(prefill_tokens)::bigint, sum(decode_tokens)::bigint from iteration",
    )
    assert [ours["iterations"], ours["prefill"], ours["decode"]] == [iterations, prefill, decode]
    ended = "select request, output_tokens, finish from request_end order by seq"
    assert ours["outputs"] == sql(server, ended)
    assert ours["rows"] >= 8, "the sixteen shared steps"

    until(page, f"({PAINTED})().decode > 50")
    assert page.evaluate(PAINTED)["prefill"] > 50
    expect(page.locator(".ender")).not_to_have_count(0)


def test_stop_cancels_the_request_and_the_page_says_so(page: Page, server: Server) -> None:
    def endless(route: Route) -> None:
        body: dict[str, Any] = route.request.post_data_json or {}
        route.continue_(post_data={**body, "ignore_eos": True})

    open_page(page, server)
    page.route("**/v1/chat/completions", endless)
    send(page, "Go on", max_tokens=1500)
    until(page, "[...iterscope.store.live].some((r) => r.output > 3)")
    page.get_by_role("button", name="Stop", exact=True).click()
    until(page, "iterscope.store.ended.at(-1)?.end.finish === 'cancelled'")
    expect(page.locator(".try-status")).to_have_text(re.compile(r"^#\d+ · cancelled"))
    expect(page.locator(".ender").first).to_have_text(re.compile(r"#\d+\s*cancelled"))


def test_pointer_and_keys(page: Page, server: Server) -> None:
    open_page(page, server)
    send(page, "Look at me", max_tokens=64)
    wait_ended(page, 1)
    page.locator("main").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".hair")).to_be_visible()
    page.locator(".plane:not(.under)").hover(position={"x": 400, "y": 12})
    expect(page.get_by_role("tooltip")).to_contain_text("iteration ")
    page.mouse.move(5, 5)
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    until(page, f"({PAINTED})().decode > 0")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("How to read the score")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator(".hair")).to_be_hidden()
