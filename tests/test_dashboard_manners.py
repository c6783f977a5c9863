"""The manners of every view, in a real browser: open to everybody, behind a proxy, of any width.

Owns what all views promise alike: nothing that shuts people out (axe-core), a policy that nothing
violates, a prefix that nothing leaves, no prompt, no sideways scrolling from 900 px to 4K, and a
way by keyboard. What a view shows is its own tests' affair.
"""

import re
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests import tiny
from tests.browser import watched_page
from tests.proxy import proxied
from tests.servers import Server, serving

KEY = "operator-" + "k" * 24
CANARY = "xylophone marmalade"
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
FAULTS = """(rules) => axe.run(rules).then((found) => found.violations
    .filter(({impact}) => impact === 'serious' || impact === 'critical')
    .map(({id, nodes}) => id + ': ' + nodes.slice(0, 3).map(({html}) => html).join(' | ')))"""
# All that another theme changes.
OF_COLOUR = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
SIZES = ((900, 700), (1280, 720), (1920, 1080), (3840, 2160))
WIDER = """[document.documentElement, document.querySelector('main'),
    ...document.querySelectorAll('main > *')]
    .filter((one) => !one.matches('.verdict'))  // one line, cut at its end with an ellipsis
    .map((one) => one.scrollWidth - one.clientWidth)"""
FOCUSED = """() => {
    const {activeElement: on} = document;
    const {outlineStyle, outlineWidth} = getComputedStyle(on);
    return {place: on.outerHTML.slice(0, 120), body: on === document.body,
        seen: outlineStyle !== 'none' && parseFloat(outlineWidth) > 0};
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("manners")
    flags = (f"--history={folder / 'history'}", "--max-num-seqs=4")
    with serving(folder, tiny.write(folder / "tiny"), *flags, parrot=True) as running:
        yield running


@pytest.fixture(scope="module")
def request_id(server: Server) -> str:
    """Return the id of a request with neighbours, the last of some that have ended."""
    body = {"prompt": [CANARY] * 6, "max_tokens": 24, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return f"{answer.json()['id']}-0"


@pytest.fixture(scope="module")
def views(browser: Browser, server: Server, request_id: str) -> list[str]:
    """Return the addresses of all views that the page itself names, and of one request."""
    with watched_page(browser) as page:
        page.goto(f"{server.url}/dashboard/")
        links = page.locator("#pages a")
        expect(links.first).to_be_visible()
        found = [links.nth(at).get_attribute("href") or "" for at in range(links.count())]
    assert {"#/live", "#/request", "#/try"} <= set(found)
    return [*found, f"#/request/{request_id}"]


def settled(page: Page) -> None:
    """Wait until the view stands: the stream is there, and nothing is being asked for."""
    expect(page.locator("#link")).to_contain_text("live")
    page.wait_for_load_state("load")
    if "/request/" in page.url:
        expect(page.locator(".chip")).to_have_text("length")


def faults(page: Page, **rules: object) -> list[str]:
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(FAULTS, rules)
    return found


def widest(page: Page) -> int:
    """Return by how much the view is too wide once its drawing has followed the window's size."""
    deadline = time.monotonic() + 5
    while (wider := max(page.evaluate(WIDER))) > 1 and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    return int(wider)


def test_no_view_shuts_anybody_out(browser: Browser, server: Server, views: list[str]) -> None:
    found = {}
    with watched_page(browser) as page:
        for view in views:
            page.goto(f"{server.url}/dashboard/{view}")
            settled(page)
            found[view, "dark"] = faults(page)
            page.evaluate("iterscope.flip()")
            found[view, "light"] = faults(page, runOnly=OF_COLOUR)
            page.evaluate("iterscope.flip()")
        page.goto(f"{server.url}/dashboard/#/live")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_be_visible()
        found["help", "dark"] = faults(page)
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
    assert not {place: those for place, those in found.items() if those}


def test_the_login_page_shuts_nobody_out_and_axe_can_find(browser: Browser, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    with serving(tmp_path, model, "--api-key", KEY, ready=False, parrot=True) as server:
        for theme in ("dark", "light"):
            with watched_page(browser, theme=theme) as page:
                page.goto(f"{server.url}/dashboard/login/")
                expect(page.get_by_label("API key")).to_be_focused()
                assert not faults(page), theme
                page.evaluate("document.querySelector('label').remove()")
                assert any("label" in fault for fault in faults(page)), "axe sees what is planted"


def test_the_header_and_the_page_name_one_policy(server: Server) -> None:
    for path in ("/dashboard/", "/dashboard/login/"):
        answer = server.get(path)
        policy = answer.headers["content-security-policy"]
        meta = re.search(r'Security-Policy"\s+content="([^"]*)"', answer.text)
        assert meta
        rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
        for rule in meta[1].split(";"):
            name, _, value = rule.strip().partition(" ")
            assert set(value.split()) <= set(rules[name].split()), f"{path}: {name}"
        assert "unsafe" not in policy + meta[1]
        assert rules["default-src"] == "'none'"
        assert rules["frame-ancestors"] == "'none'"


def test_no_view_scrolls_sideways(browser: Browser, server: Server, views: list[str]) -> None:
    found = {}
    with watched_page(browser) as page:
        for view in views:
            page.goto(f"{server.url}/dashboard/{view}")
            settled(page)
            for width, height in SIZES:
                page.set_viewport_size({"width": width, "height": height})
                found[view, width] = widest(page)
    assert not {place: wider for place, wider in found.items() if wider > 1}


def test_every_view_is_reached_and_gone_through_by_keyboard(
    browser: Browser, server: Server, views: list[str]
) -> None:
    with watched_page(browser) as page:
        page.goto(f"{server.url}/dashboard/")
        settled(page)
        for at, view in enumerate(views[:-1], start=1):
            page.evaluate("document.activeElement.blur()")
            page.keyboard.press(str(at))
            expect(page).to_have_url(re.compile(re.escape(view)))
            places = set()
            for _ in range(12):
                page.keyboard.press("Tab")
                focus: dict[str, Any] = page.evaluate(FOCUSED)
                assert focus["body"] or focus["seen"], f"{view}: {focus['place']}"
                places.add(focus["place"])
            assert len(places) > 4, f"{view}: the focus moves"


def test_no_word_of_a_prompt_reaches_a_page(
    browser: Browser, server: Server, views: list[str]
) -> None:
    with watched_page(browser) as page:
        heard: list[str] = []
        page.on(
            "response",
            lambda answer: (
                heard.append(answer.text())
                if "json" in (answer.headers.get("content-type") or "")
                else None
            ),
        )
        for view in views:
            page.goto(f"{server.url}/dashboard/{view}")
            settled(page)
            assert CANARY not in page.content()
        assert heard
        assert not any(CANARY in text for text in heard)


def test_all_of_it_works_under_a_prefix_behind_a_proxy(browser: Browser, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "tiny")
    with (
        serving(tmp_path, model, "--api-key", KEY) as server,
        proxied(server.url, "/tools/iterscope") as behind,
        watched_page(browser) as page,
    ):
        page.goto(f"{behind.url}/dashboard/#/request")
        expect(page).to_have_url(f"{behind.url}/dashboard/login/?from=page#/request")
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{behind.url}/dashboard/#/request")
        settled(page)
        page.get_by_role("link", name="Live").click()
        page.get_by_label("Prompt").fill("hello there")
        page.get_by_label("max tokens").fill("8")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator(".try-status")).to_contain_text("first after")
        page.get_by_role("button", name="Open", exact=True).click()
        expect(page.locator(".chip")).to_have_text(re.compile("stop|length"))
        page.get_by_role("link", name="Sign out").click()
        expect(page).to_have_url(re.compile(re.escape(f"{behind.url}/dashboard/login/")))
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        for path in ("/", "/dashboard"):
            answer = httpx.get(behind.url + path, headers={"accept": "text/html"}, timeout=20)
            assert answer.headers["location"].startswith(("dashboard/", "login/"))
        assert not behind.strays
