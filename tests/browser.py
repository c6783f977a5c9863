"""Debian's Chromium for tests, driven by Playwright, with nothing that calls home.

Owns the browser's flags and its end, and a page that fails its test when it says anything, or when
the page's own policy stopped something. Tests of the dashboard and of signing in use it.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

from tests.servers import Server, wait

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 30_000
LEFT = "left clean"
# The browser itself reports what a server answers or that it is gone; the page has no say in that.
BROWSERS_OWN = re.compile(r"Failed to load resource: (net::ERR|the server responded)")
CALM = """
    // Ten frames a second instead of sixty: no test looks at motion, and drawing is what costs.
    const frame = window.requestAnimationFrame.bind(window);
    window.requestAnimationFrame = (run) => setTimeout(() => frame(run), 85);
"""
WATCH_POLICY = """
    window.violations = [];
    document.addEventListener('securitypolicyviolation', (event) =>
        window.violations.push(event.violatedDirective + ' ' + event.blockedURI));
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable, "chromium is missing: `make test` says how to install it"
    expect.set_options(timeout=WAIT_MS)  # five seconds by default: too short on a busy machine
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def watched_page(
    browser: Browser, *, width: int = 1440, height: int = 900, theme: str = "dark"
) -> Iterator[Page]:
    """Give a page that fails the test at its end when it said, raised or violated anything.

    A page that an earlier test has left clean is used again: a fresh one costs a second of CPU.
    """
    page = idle_page(browser) or fresh_page(browser)
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    said: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if not BROWSERS_OWN.match(message.text):
            said.append(message.text)

    def listen_errors(error: Error) -> None:
        said.append(str(error))

    page.on("console", listen)
    page.on("pageerror", listen_errors)
    try:
        yield page
        said += page.evaluate("window.violations ?? []")
    except BaseException:
        page.close()
        raise
    page.remove_listener("console", listen)
    page.remove_listener("pageerror", listen_errors)
    leave_clean(page)
    assert not said, said


def idle_page(browser: Browser) -> Page | None:
    """Return a page that `leave_clean` has left, and nobody has taken since."""
    for context in browser.contexts:
        for page in context.pages:
            if page.url == "about:blank" and page.evaluate("window.name") == LEFT:
                page.evaluate("window.name = ''")
                return page
    return None


def fresh_page(browser: Browser) -> Page:
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.add_init_script(WATCH_POLICY)
    page.add_init_script(CALM)
    return page


def leave_clean(page: Page) -> None:
    """Take away all that a test has left in the page, and let the next one have it."""
    page.unroute_all()
    if page.url.startswith("http"):
        page.evaluate("localStorage.clear()")
    page.context.clear_cookies()
    page.goto("about:blank")
    page.evaluate(f"window.name = {LEFT!r}")


def visit(page: Page, server: Server, address: str) -> None:
    """Open an address of the dashboard anew, as from outside."""
    page.goto("about:blank")
    page.goto(f"{server.url}/dashboard/{address}")


def until(page: Page, truth: str) -> None:
    """Wait for an expression in the page; its policy lets Playwright's own waiting run nothing."""
    wait(lambda: page.evaluate(truth), WAIT_MS / 1e3)
