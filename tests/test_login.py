"""The page of a server that wants a key, in a real browser: signing in, the stream, signing out.

The stream is the point: a browser's EventSource can send no key, and goes by the cookie. Pages of
other origins try the same and get nothing.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests import tiny
from tests.browser import CALM
from tests.servers import Server, answers, serving

KEY = "operator-" + "k" * 24
WAIT_MS = 30_000
ATTACKS = """async (url) => {
    const tried = {};
    const post = {method: 'POST', mode: 'no-cors', body: '{"prompt": "x", "max_tokens": 1}'};
    const attempts = {
        read: () => fetch(url + '/version').then((answer) => answer.text()),
        read_by_cookie: () => fetch(url + '/metrics', {credentials: 'include'}),
        write: () => fetch(url + '/v1/completions', post).then((answer) => answer.type),
        stream: () => new Promise((resolve, reject) => {
            const source = new EventSource(url + '/telemetry/stream', {withCredentials: true});
            source.onopen = () => resolve('opened');
            source.onerror = () => { source.close(); reject(new Error('refused')); };
        }),
        frame: () => new Promise((resolve) => {
            const frame = document.createElement('iframe');
            frame.src = url + '/dashboard/';
            frame.onload = () => resolve('loaded');
            document.body.append(frame);
        }),
    };
    for (const [name, attempt] of Object.entries(attempts)) {
        tried[name] = await attempt().then(String, (error) => 'failed');
    }
    return tried;
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("login")
    flags = ("--api-key", KEY)
    model = tiny.write(folder / "model")
    with serving(folder, model, *flags, ready=False, parrot=True) as running:
        running.wait(lambda: answers(running, "/ready"), 60)
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context()
    made.set_default_timeout(WAIT_MS)
    made.add_init_script(CALM)
    yield made
    made.close()


def sign_in(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/dashboard/#t=5")
    expect(page).to_have_url(f"{server.url}/dashboard/login/?from=page#t=5")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#link")).to_contain_text("live", timeout=WAIT_MS)


def test_a_key_once_and_the_page_lives(server: Server, context: BrowserContext) -> None:
    page = context.new_page()
    raised: list[str] = []
    page.on("pageerror", lambda error: raised.append(str(error)))
    page.goto(f"{server.url}/")
    page.get_by_label("API key").fill("not the key")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known")
    sign_in(page, server)
    expect(page).to_have_url(f"{server.url}/dashboard/#t=5")
    page.get_by_label("Prompt").fill("hello")
    page.get_by_label("max tokens").fill("3")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("body")).to_contain_text("3 tokens", timeout=WAIT_MS)
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], KEY in cookie["value"]) == (
        True,
        "Strict",
        False,
    )
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("link", name="Sign out").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert not context.cookies()
    page.goto(f"{server.url}/dashboard/")
    expect(page.get_by_label("API key")).to_be_visible()
    assert not raised


def test_a_session_that_ends_leads_to_the_login_page(
    server: Server, context: BrowserContext
) -> None:
    page = context.new_page()
    sign_in(page, server)
    context.clear_cookies()
    # As after a restart of the server: the stream breaks, and nobody is signed in any more.
    page.evaluate("iterscope.source.open()")
    expect(page.get_by_label("API key")).to_be_visible()


@contextmanager
def evil_site() -> Iterator[str]:
    """Serve a page from another port: another origin, though cookies count it as the same site."""

    class Blank(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>win a prize</title>")

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Blank) as site:
        thread = threading.Thread(target=site.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{site.server_address[1]}"
        site.shutdown()
        thread.join()


def test_a_page_of_another_origin_gets_nothing(server: Server, context: BrowserContext) -> None:
    """With the operator signed in beside it, and from the same machine."""
    sign_in(context.new_page(), server)
    with evil_site() as evil:
        page = context.new_page()
        page.goto(evil)
        tried = page.evaluate(ATTACKS, server.url)
    assert {name for name, got in tried.items() if got != "failed"} <= {"write", "frame"}
    assert tried["write"] == "opaque"  # it was sent: what counts is what the server did with it
    ended = [line for line in server.log.splitlines() if " request=" in line]
    assert len(ended) <= 1, "nobody but the operator's own page has asked for anything"


def test_a_rebound_name_is_not_answered(server: Server) -> None:
    """The attacker's own name points to 127.0.0.1 by now: same origin, as the browser sees it."""
    port = httpx.URL(server.url).port
    with socket.create_connection(("127.0.0.1", port or 0), timeout=20) as made:
        made.sendall(
            b"GET /session HTTP/1.1\r\nHost: evil.example:%d\r\n"
            b"Origin: http://evil.example:%d\r\n\r\n" % (port, port)
        )
        assert b" 403 " in made.recv(1000)
