"""Debian's Chromium for tests, driven by Playwright, with nothing that calls home.

Owns the browser's flags and its end, and a page that fails its test when it says anything, or when
the page's own policy stopped something. Tests of the dashboard and of signing in use it.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

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
# The browser itself reports what a server answers or that it is gone; the page has no say in that.
BROWSERS_OWN = re.compile(r"Failed to load resource: (net::ERR|the server responded)")
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
    """Give a page that fails the test at its end when it said, raised or violated anything."""
    dark = theme == "dark"
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page.set_default_timeout(WAIT_MS)
    page.add_init_script(WATCH_POLICY)
    said: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if not BROWSERS_OWN.match(message.text):
            said.append(message.text)

    page.on("console", listen)
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    said += page.evaluate("window.violations ?? []")
    page.close()
    assert not said, said
