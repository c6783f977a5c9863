"""The Request and Try views in a real browser, over a real server with the tiny model.

Owns the proofs that a request's page says what its explanation says, in each of its states, that a
running one is cancelled from it, that all of it goes by keyboard, and that traffic is sent.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests import tiny
from tests.servers import Server, serving

WAIT_MS = 30_000
CANARY = "xylophone marmalade"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context holds answers that no browser outlasts."""
    shape = tiny.Shape(model_len=32_768)
    return tiny.write(tmp_path_factory.mktemp("request") / "tiny", shape=shape)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder, model, f"--history={folder / 'history'}", "--max-num-seqs=4") as running:
        yield running


def complete(server: Server, prompt: str = "one two three", **asked: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **asked}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["id"]
    return found


def explained(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/v1/requests/{name}").json()
    return found


def open_request(page: Page, server: Server, name: str) -> None:
    page.goto(f"{server.url}/dashboard/#/request/{name}")


def test_the_page_says_what_the_explanation_says(page: Page, server: Server) -> None:
    name = complete(server)
    open_request(page, server, name)
    expect(page.locator(".chip")).to_have_text("length")
    told = explained(server, name)
    shown = page.locator(".falls tbody code").all_inner_texts()
    whole = told["e2e_ms"]
    assert shown == [one["cause"] for one in told["causes"] if one["ms"] / whole >= 0.0015]
    expect(page.locator(".falls .sum")).to_contain_text("100 %")
    receipt = page.locator(".req-side .facts")
    expect(receipt).to_contain_text(name)
    expect(receipt).to_contain_text("24 of 24")
    expect(receipt).to_contain_text(re.compile(r"device\d+(\.\d+)? ms"))
    events = page.locator(".events code").all_inner_texts()
    assert events == [event["event"] for event in told["timeline"]]
    painted = page.evaluate(
        """() => {
            const canvas = document.querySelector('.req-plane canvas');
            const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let i = 3; i < data.length; i += 4) if (data[i] > 128) found++;
            return found;
        }"""
    )
    assert painted > 2000
    assert "Prompt" not in page.locator(".req-side").inner_text(), "prompts are not shown"


def test_tokens_are_read_by_keyboard_alone(page: Page, server: Server) -> None:
    name = complete(server)
    open_request(page, server, name)
    words = page.locator(".req-words")
    expect(page.locator(".chip")).to_have_text("length")
    page.locator(".req-plane").focus()
    page.keyboard.press("Home")
    expect(words).to_contain_text("token 2 after")
    page.keyboard.press("ArrowRight")
    expect(words).to_contain_text("token 3 after")
    expect(words).to_contain_text("batch row 0")
    page.keyboard.press("End")
    expect(words).to_contain_text("token 24 after")
    wide = "iterscope.router.page.picture.scale"
    whole = page.evaluate(f"{wide}.to_ms - {wide}.from_ms")
    page.keyboard.press("+")
    assert page.evaluate(f"{wide}.to_ms - {wide}.from_ms") == pytest.approx(whole / 1.25)
    page.keyboard.press("0")
    assert page.evaluate(f"{wide}.to_ms - {wide}.from_ms") == pytest.approx(whole)


def test_a_running_request_is_followed_and_cancelled(page: Page, server: Server) -> None:
    asked = {"prompt": "go on", "max_tokens": 30_000, "ignore_eos": True}
    server.post("/traffic", {"requests": [asked]})
    live = server.wait(lambda: server.get("/v1/requests").json()["data"])
    page.goto(f"{server.url}/dashboard/#/request")
    page.locator(".finder").get_by_role("button", name=live[0]["request_id"]).click()
    expect(page.locator(".chip")).to_have_text("running")
    expect(page.locator(".req-head")).to_contain_text("so far")
    first = page.locator(".req-head p").inner_text()
    expect(page.locator(".req-head p")).not_to_have_text(first)
    cancel = page.get_by_role("button", name="Cancel request")
    cancel.focus()
    page.keyboard.press("Enter")
    sure = page.get_by_role("button", name="Press again to cancel it")
    expect(sure).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".chip")).to_have_text("cancelled (api)")
    expect(page.get_by_role("button", name="Cancel request")).to_be_hidden()
    expect(page.locator(".events")).to_contain_text("cancel_requested")


def test_unknown_failing_and_back(page: Page, server: Server) -> None:
    open_request(page, server, "nobody")
    expect(page.locator(".req-said")).to_contain_text("No request on record has this id")
    name = complete(server)
    refused = {"error": {"message": "the engine is down", "code": "engine_down"}}
    path = f"**/v1/requests/{name}"
    page.route(path, lambda route: route.fulfill(status=503, json=refused))
    open_request(page, server, name)
    expect(page.locator(".req-said")).to_contain_text("It cannot be shown yet: the engine is down")
    page.unroute(path)
    expect(page.locator(".chip")).to_have_text("length")
    expect(page.locator(".req-said")).to_be_hidden()
    page.get_by_role("button", name="Other requests").click()
    expect(page).to_have_url(re.compile("#/request$"))
    expect(page.locator(".finder")).to_contain_text(name)
    page.go_back()
    expect(page.locator(".chip")).to_have_text("length")


def test_a_thousand_in_flight_are_counted_and_found(page: Page, server: Server) -> None:
    one = {
        "request_id": "",
        "external_id": None,
        "endpoint": "completions",
        "stream": True,
        "age_ms": 5.0,
    }
    data = [
        {
            **one,
            "request_id": f"cmpl-{number:04d}",
            "sequences": [
                {
                    "request_id": f"cmpl-{number:04d}",
                    "state": "waiting",
                    "prompt_tokens": 9,
                    "output_tokens": 0,
                    "max_tokens": 9,
                }
            ],
        }
        for number in range(1000)
    ]
    page.route("**/v1/requests", lambda route: route.fulfill(json={"data": data}))
    page.goto(f"{server.url}/dashboard/#/request")
    finder = page.locator(".finder section").first
    expect(finder.locator("tbody tr")).to_have_count(100)
    expect(finder).to_contain_text("and 900 others")
    page.get_by_label("Open a request").fill("cmpl-0777")
    expect(finder.locator("tbody tr")).to_have_count(1)
    expect(finder).to_contain_text("cmpl-0777")


def test_a_server_without_a_history_that_shows_prompts_and_lets_no_page_send_any(
    page: Page, model: Path, tmp_path: Path
) -> None:
    """Three settings at once: lists need no history, prompts are shown where the operator says."""
    with serving(tmp_path, model, "--show-prompts", "--no-try-it", parrot=True) as server:
        page.goto(f"{server.url}/dashboard/#/request")
        expect(page.locator("#link")).to_contain_text("live", timeout=WAIT_MS)
        expect(page.locator(".finder")).to_contain_text("Nothing has ended on this server yet.")
        name = complete(server, CANARY)

        def listed() -> bool:
            """Ask for the list again: the end of a request is told after its answer."""
            page.get_by_role("button", name="newest").click()
            page.wait_for_timeout(100)
            return name in page.locator(".finder").inner_text()

        server.wait(listed, WAIT_MS / 1e3)
        open_request(page, server, name)
        expect(page.locator(".req-prompt")).to_have_text(CANARY)
        page.get_by_role("link", name="Try it").click()
        expect(page.locator(".traffic")).to_contain_text("does not let its page send prompts")
        expect(page.get_by_role("button", name="Start")).to_have_count(0)
        page.get_by_role("link", name="Live").click()
        expect(page.locator(".side .try")).to_contain_text("is off (see --try-it)")
        expect(page.get_by_role("button", name="Send")).to_have_count(0)


def test_traffic_starts_goes_on_in_another_view_and_stops(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/dashboard/#/try")
    expect(page.locator("#link")).to_contain_text("live", timeout=WAIT_MS)
    rate = page.get_by_label("Arrivals")
    rate.fill("")
    expect(page.locator(".try-said")).to_have_text("Arrivals must lie within 0 and 200.")
    page.get_by_role("button", name="Start").click()
    assert not page.evaluate("iterscope.generator.running")
    for label, value in (("Arrivals", 30), ("Prompt length", 8), ("Output length", 4)):
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_role("button", name="Start").click()
    server.wait(lambda: server.get("/traffic").json()["answered"].get("200", 0) > 5)
    page.get_by_role("link", name="Live").click()
    before = server.get("/traffic").json()["answered"]["200"]
    server.wait(lambda: server.get("/traffic").json()["answered"]["200"] > before + 5)
    page.get_by_role("link", name="Try it").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    server.wait(lambda: server.get("/traffic").json()["in_flight"] == 0)
    sent = page.evaluate("iterscope.generator.sent")
    begun = page.locator(".try-figures dd").nth(2)
    expect(begun).to_have_text(str(sent))
