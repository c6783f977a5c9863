"""The page under the load it is built for: frames, drawing, age of the newest mark, heap.

Records a big engine (bench/recorded_stream.py), serves the page and the recording from a small
paced server, and opens Debian's Chromium on it. In one run it counts frames, times the drawing,
compares the rows that were drawn with the rows that came, and takes the heap after a collection at
the beginning and at the end. An hour of an engine at 33 steps a second is ten minutes of 200.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from bench.machine import StolenTime, describe
from bench.recorded_stream import Engine, Send, Shape, hello, write

PAGES = Path(__file__).resolve().parent.parent / "dashboard"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
HOUR_STEPS_PER_S = 1000 / 30
WARM_S = 8
PROBE = Path(__file__).parent / "data" / "dashboard_probe.js"


class Recording:
    """What is served: the page's files, and the recording to each reader from its start."""

    def __init__(self, path: Path, engine: Engine, sends: list[Send]) -> None:
        self.path, self.engine, self.sends = path, engine, sends
        self.late_ns: list[int] = []

    def frames(self) -> Iterator[bytes]:
        """Yield the hello and then each send when it is due."""
        zero_ns = time.time_ns()
        yield hello(self.engine, zero_ns // 1000)
        with self.path.open("rb") as file:
            for send in self.sends:
                data = file.read(send.length)
                left_ns = send.due_ns - (time.time_ns() - zero_ns)
                if left_ns > 0:
                    time.sleep(left_ns / 1e9)
                self.late_ns.append(max(0, -left_ns))
                yield data


def handler(recording: Recording) -> type[BaseHTTPRequestHandler]:
    """Return the handler of this recording."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/telemetry/stream":
                self._stream()
            elif path == "/session":
                body = {"key_needed": False, "signed_in": True, "try_it": "off"}
                self._answer(json.dumps(body).encode(), "application/json")
            else:
                file = (PAGES / path.removeprefix("/dashboard/")).resolve()
                file = file / "index.html" if file.is_dir() else file
                inside = file.is_relative_to(PAGES) and file.is_file()
                self._answer(
                    file.read_bytes() if inside else None, TYPES.get(file.suffix, "image/svg+xml")
                )

        def _answer(self, body: bytes | None, kind: str) -> None:
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body or b"")

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for data in recording.frames():
                    self.wfile.write(data)
            except OSError:
                pass  # the page is closed

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def served(recording: Recording) -> Iterator[str]:
    """Serve it on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(recording))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/dashboard/"
    server.shutdown()
    server.server_close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Open Debian's Chromium."""
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("chromium is missing")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


def heap_mb(session: CDPSession) -> float:
    """Return what the page's script holds, after a collection."""
    session.send("HeapProfiler.collectGarbage")
    session.send("HeapProfiler.collectGarbage")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(m["value"] for m in metrics if m["name"] == "JSHeapUsedSize")) / 2**20


def watch(page: Page, seconds: float) -> dict[str, Any]:
    """Measure for so long, and return what the probe found."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.wait_for_timeout(WARM_S * 1000)
    before_mb = heap_mb(session)
    page.evaluate(PROBE.read_text(encoding="utf-8"))
    began = time.monotonic()
    page.wait_for_timeout(seconds * 1000)
    found: dict[str, Any] = page.evaluate("probe.read()")
    lasted_s = time.monotonic() - began
    found["heap_mb"] = heap_mb(session)
    found["heap_growth_mb"] = found["heap_mb"] - before_mb
    found["lasted_s"] = lasted_s
    return found


def report(found: dict[str, Any], shape: Shape, recording: Recording) -> dict[str, Any]:
    """Return the figures, and print them."""
    steps_an_hour = HOUR_STEPS_PER_S * 3600
    share = shape.steps_per_s * found["lasted_s"] / steps_an_hour
    figures = {
        "frames_per_s": found["frames_per_s"],
        "draw_ms_p95": found["draw_ms_p95"],
        "heap_growth_mb_per_hour": found["heap_growth_mb"] / share,
        "newest_mark_age_ms_p95": found["age_ms_p95"],
        "newest_mark_age_ms_max": found["age_ms_max"],
        "rows_received": found["rows_received"],
        "marks_drawn": found["marks_drawn"],
    }
    late_ms = max(recording.late_ns, default=0) / 1e6
    print(f"{shape.lanes} lanes x {shape.steps_per_s} iterations/s, {found['lasted_s']:.0f} s")
    print(
        f"frames/s           {figures['frames_per_s']:8.1f}  worst {found['frame_ms_max']:.0f} ms"
    )
    print(
        f"draw ms            p50 {found['draw_ms_p50']:.2f}  p95 {figures['draw_ms_p95']:.2f}"
        f"  p99 {found['draw_ms_p99']:.2f}"
    )
    print(f"reading records    {found['ingest_share']:8.1%} of the time")
    print(
        f"marks drawn        {figures['marks_drawn']} of {figures['rows_received']} rows received"
    )
    print(
        f"newest mark        p50 {found['age_ms_p50']:.0f} ms old  "
        f"p95 {figures['newest_mark_age_ms_p95']:.0f}  most {figures['newest_mark_age_ms_max']:.0f}"
    )
    print(
        f"heap               {found['heap_mb']:.1f} MB, {found['heap_growth_mb']:+.2f} MB, "
        f"{figures['heap_growth_mb_per_hour']:+.2f} MB an hour of {HOUR_STEPS_PER_S:.0f} steps/s"
    )
    print(f"sent late by       {late_ms:8.1f} ms at most")
    return figures | {"found": found, "sent_late_ms": late_ms}


def main() -> int:
    """Measure, and say whether what came was drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--steps-per-s", type=int, default=200)
    parser.add_argument("--size", default="1440x900", help="of the page, in CSS pixels")
    parser.add_argument("--screenshot", type=Path)
    flags = parser.parse_args()
    width, _, height = flags.size.partition("x")
    shape = Shape(
        lanes=flags.lanes, steps_per_s=flags.steps_per_s, seconds=flags.seconds + WARM_S + 10
    )
    with tempfile.TemporaryDirectory() as folder, StolenTime() as stolen:
        path = Path(folder) / "stream"
        recording = Recording(path, *write(path, shape))
        with served(recording) as url, chromium() as browser:
            size: Any = {"width": int(width), "height": int(height)}
            page = browser.new_page(viewport=size, color_scheme="dark")
            page.goto(url)
            found = watch(page, flags.seconds)
            if flags.screenshot:
                page.screenshot(path=str(flags.screenshot))
    figures = report(found, shape, recording)
    if flags.json:
        flags.json.write_text(json.dumps(figures | describe(stolen), indent=1))
    return 0 if figures["marks_drawn"] == figures["rows_received"] else 1


if __name__ == "__main__":
    sys.exit(main())
