"""A KV cache that is squeezed on purpose, as Prometheus sees it: `python -m tests.kv_squeeze FILE`.

Owns a real server with too few blocks, a crowd that comes and goes, a real Prometheus with the
rules that ship (their windows shortened to what a minute can hold), and a picture of Prometheus'
own page. The soak test of alerts calls it too. The engine parrots on a beat, so that the squeeze
looks alike on every machine.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

from grafana.alert_spec import Alert
from tests import alert_rules, tiny
from tests.api import post
from tests.browser import chromium
from tests.prometheus import Prometheus, prometheus
from tests.servers import Server, serving

CALM_S, CROWD_S = 20, 40
EXPECTED = ("IterscopeKvPressure", "IterscopePreemptionThrash")
GRAPHS = (
    "iterscope_kv_usage_ratio",
    "sum by (reason) (rate(iterscope_waiting_seconds_total[5s])) > 0",
    "rate(iterscope_preemptions_total[5s])",
)
"""Share of the blocks in use, requests that wait by reason, preemptions a second."""
WIDTH = 1200


@contextmanager
def crowd(server: Server, clients: int, prompt: int, answer: int) -> Iterator[None]:
    """Have so many clients ask again and again, until the block ends."""
    stop = threading.Event()

    def ask(client: int) -> None:
        # Prompts that share no beginning, so that nobody lives on another's blocks.
        body = {
            "prompt": [3 + (client * 16 + place * 7) % 256 for place in range(prompt)],
            "max_tokens": answer,
            "ignore_eos": True,
        }
        while not stop.is_set():
            answered = post(server, "/v1/completions", body)
            assert answered.status_code == 200, answered.text

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def squeeze(folder: Path, picture: Path) -> set[str]:
    """Squeeze, save the picture, and return which alerts fired while it lasted."""
    model = tiny.write(folder / "tiny")
    flags = ("--kv-blocks=48", "--max-num-seqs=32", "--ttft-ms=60000", "--tpot-ms=60000")
    rules = alert_rules.write(folder, _at_once, window="10s")
    with (
        serving(folder, model, *flags, parrot=True, beat_ms=20) as server,
        prometheus(folder, [server.url], rules=rules) as judge,
    ):
        judge.wait_scraped("iterscope_requests")
        fired: set[str] = set()
        with crowd(server, clients=3, prompt=40, answer=60):
            _look(judge, CALM_S)
            with crowd(server, clients=14, prompt=64, answer=150):
                fired = _look(judge, CROWD_S)
            _look(judge, CALM_S)
        draw(judge, picture, 2 * CALM_S + CROWD_S)
        return fired


def _at_once(alert: Alert) -> Alert:
    return replace(alert, for_s=0)


def _look(judge: Prometheus, seconds: float) -> set[str]:
    """Return the alerts that fire within so many seconds."""
    end, fired = time.monotonic() + seconds, set()
    while time.monotonic() < end:
        firing = judge.query('ALERTS{alertstate="firing"}')
        fired |= {one.labels["alertname"] for one in firing}
        judge.wait_scrapes(4)
    return fired


def draw(judge: Prometheus, picture: Path, seconds: int) -> None:
    """Save a picture of Prometheus' own page with the graphs of so many seconds."""
    asked = {}
    for number, expression in enumerate(GRAPHS):
        graph = {"expr": expression, "tab": "0", "range_input": f"{seconds}s", "step_input": "1"}
        asked |= {f"g{number}.{name}": value for name, value in graph.items()}
    with chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(f"{judge.url}/graph?{urlencode(asked)}", wait_until="networkidle")
        for number in range(len(GRAPHS)):
            page.locator("svg").nth(number).wait_for()
        page.evaluate("scrollTo(0, 0)")  # or the head is drawn where the last graph was asked for
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture, full_page=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        missing = set(EXPECTED) - squeeze(Path(place), Path(sys.argv[1]))
    sys.exit(f"did not fire: {', '.join(sorted(missing))}" if missing else 0)
