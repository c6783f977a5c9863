"""The lab's report: one file that needs nothing, says what the result says, and cannot be broken.

Owns the proof over a made-up result (tests/lab_results.py) and over what is left of it when parts
are missing: markup that is whole, hostile names as characters, no fault that axe-core finds, every
figure drawn without a script. What the figures mean is the lab's own tests' subject.
"""

import base64
import hashlib
import html.parser
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from bench.lab import report
from bench.lab.page import course, rounds
from bench.lab.page.axes import Frame, Scale, apart
from bench.lab.page.markup import VOID, tag
from bench.lab.page.numbers import plain, ranged, short, times, valued
from bench.lab.page.reasons import WAITS, WORK
from telemetry.records import CAUSES
from tests import lab_results
from tests.browser import watched_page
from tests.test_dashboard_manners import AXE, FAULTS, OF_COLOUR
from tests.test_palette import palette

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</script><script>alert(1)</script>'\"\u202e&amp;\ud800\x00"
FIGURES = {"rounds", "course-0", "course-1", "course-2", "step-time", "waits", "life", "lost"} | {
    *("ttft", "tpot", "itl", "e2e", "rate-output_tok_s", "rate-goodput_requests_s"),
    *("rate-goodput_share", "rate-unfinished_share", "compared-ttft_p99_ms"),
}


class Elements(html.parser.HTMLParser):
    """Reads a page strictly: what was opened is closed, and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.names: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        given = dict(attrs)
        assert not any(name.startswith("on") or name == "style" for name in given), attrs
        self.names += [given["id"] or ""] if "id" in given else []
        self.links += [given[name] or "" for name in ("href", "src", "xlink:href") if name in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def read(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    elements.close()
    assert not elements.open
    repeated = [name for name, count in Counter(elements.names).items() if count > 1]
    assert not repeated
    assert all(link.startswith("#") for link in elements.links), elements.links
    assert {link[1:] for link in elements.links} <= set(elements.names)
    return elements


def mangled(value: Any, change: Callable[[str], str]) -> Any:
    """Return a result with every text in it changed, keys and verdicts' closed words apart."""
    closed = {"ratio", "difference", "holds", "fails", "mixed", "prefill", "decode"}
    if isinstance(value, dict):
        return {key: mangled(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [mangled(one, change) for one in value]
    return change(value) if isinstance(value, str) and value not in closed else value


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    report.write(lab_results.result(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    elements = read(page)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert elements.seen["figure"] == elements.seen["figcaption"] >= 18
    assert set(elements.names) >= FIGURES
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        assert re.search(
            r'<h3>[^<]+<span class="unit">[^<]+</span></h3><p id="[^"]+">[^<]{20}', figure
        )
        assert "<svg" in figure
        assert re.search(r"<details.*<tbody><tr>", figure, re.DOTALL)


def test_the_policy_allows_what_is_in_the_page_and_nothing_else() -> None:
    page = report.page(lab_results.result())
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{rule} &#x27;sha256-{digest}&#x27;" in page
    assert "default-src &#x27;none&#x27;" in page


def test_hostile_names_stay_characters() -> None:
    result = mangled(lab_results.result(), lambda text: text + HOSTILE)
    names = {one["name"]: one["name"] for one in result["arms"]}
    result["figures"] = lab_results.result()["figures"]
    for row in result["comparisons"] + result["at_slo"]:
        row["figure"] = row["figure"].removesuffix(HOSTILE)
    page = report.page(result)
    elements = read(page)
    assert elements.seen["script"] == 1
    assert len(names) == 3
    assert "alert(1)</script>" not in page
    assert "\u202e" not in page
    assert "\\u202e&amp;amp;?\\u0000" in page
    page.encode("utf-8")


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what a lab that was cut short may hand over: keys without content, or not there."""
    yield "nothing", {}
    whole = lab_results.result()
    for name in ("curves", "comparisons", "timelines", "runs", "waits"):
        whole[name] = whole[name][:4]  # a page of a twentieth of the size
    for line in whole["timelines"]:
        line |= {name: column[:9] for name, column in line.items() if isinstance(column, list)}
    kept = {name: value for name, value in whole.items() if isinstance(value, list | dict)}
    for place, (name, value) in enumerate(kept.items()):
        if place % 2:
            yield f"{name} empty", whole | {name: type(value)()}
        else:
            yield f"no {name}", {key: one for key, one in whole.items() if key != name}
    once = whole
    for row in once["curves"]:
        for figure in row["figures"].values():
            figure |= {"low": None, "high": None, "values": [figure["mean"], None]}
    for row in once["comparisons"]:
        row |= {"low": None, "high": None, "p": None, "value": None}
    yield "one repeat", once


def test_what_is_not_there_is_left_out() -> None:
    for name, result in parts():
        elements = read(report.page(result))
        assert elements.seen["h1"] == 1, name
    assert "Not complete: 7 of 54 runs" in report.page(
        lab_results.result() | {"complete": False, "runs_done": 7}
    )


def test_the_page_says_the_results_own_figures() -> None:
    result = lab_results.result()
    page = report.page(result)
    point = result["operating_points"][0]
    assert f">{point['at_slo_requests_s']:.2f}<" in page
    for one in result["hypotheses"]:
        assert one["claim"].replace("'", "&#x27;") in page
        assert json.dumps(one["evidence"][0]["rows"][0][0]) in page
    assert "T(B) = 9.40 ms + 1.31 ms" in page
    assert "knee at 7.2 rows" in page
    held = max(row["batch_held_ms"] for row in result["static_lost"])
    assert f"held for {valued(held, 'ms')}" in page
    assert "239 of 240 outputs are the same" in page
    result["equality"]["differing"][0]["allowed"] = False
    assert "1 differ where the two best were far apart: that is wrong." in report.page(result)


def test_no_mark_lies_outside_its_picture() -> None:
    page = report.page(lab_results.result())
    for width, height, inside in re.findall(
        r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"(.*?)</svg>', page, re.DOTALL
    ):
        for name, bound in (("x", width), ("x1", width), ("x2", width), ("cx", width)):
            for found in re.findall(rf' {name}="(-?[\d.]+)"', inside):
                assert -3 <= float(found) <= float(bound) + 1, (name, found)
        for name in ("y", "y1", "y2", "cy"):
            for found in re.findall(rf' {name}="(-?[\d.]+)"', inside):
                assert -1 <= float(found) <= float(height) + 1, (name, found)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_the_dashboards(theme: str) -> None:
    style = (report.PAGE / "style.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if theme == "light" else dark))
    assert len(found) > 20
    ours = re.search(
        rf'data-theme="{theme}"\] \{{(.*?)\n\}}',
        (ROOT / "dashboard" / "style.css").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert ours
    theirs = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", ours[1]))
    assert found == {name: theirs[name] for name in found}
    assert set(found) <= set(palette(theme))


# ---- parts of pictures


def test_every_cause_is_in_one_part_of_a_life() -> None:
    of_life = [cause for _, causes in WORK.values() for cause in causes]
    assert sorted(of_life) == sorted(CAUSES)
    assert {cause for _, causes in WAITS.values() for cause in causes} < set(CAUSES)


def test_rows_of_the_ended_are_idle_until_the_batch_is_over() -> None:
    shown = lab_results.result()["rounds"][1]
    steps = shown["steps"]
    assert rounds.held_of(41, steps) == set(range(4, 12))
    assert rounds.held_of(44, steps) == set()
    lanes = rounds.lanes_of(shown, steps)
    assert lanes == [41, 42, 43, 44, 45, 46]
    assert rounds.others_of(lanes, steps) == [0] * 12
    assert rounds.others_of(lanes[1:], steps) == [0] * 4 + [1] * 8
    continuous = lab_results.result()["rounds"][0]
    assert not any(rounds.held_of(one, continuous["steps"]) for one in range(41, 48))


def test_a_course_is_averaged_over_time_not_over_steps() -> None:
    timeline = {
        "begin_ms": [0.0, 10.0, 60.0],
        "end_ms": [10.0, 40.0, 100.0],
        "rows": [8, 4, 2],
        "idle_rows": [0, 2, 0],
        "waiting": [5, 0, 1],
    }
    cut = course.columns_of(timeline, 100.0, count=2)
    assert cut.rows == pytest.approx([(8 * 10 + 4 * 30) / 50, 2 * 40 / 50])
    assert cut.idle == pytest.approx([2 * 30 / 50, 0])
    assert cut.waiting == [5, 1]


def test_scales_hold_their_values_and_name_round_ones() -> None:
    frame = Frame()
    log = frame.up([12.0, 900.0, 4000.0], log=True)
    assert log.log
    assert log.at(0.001) == frame.y_end
    assert log.at(1e9) == frame.top
    assert [value for value in log.ticks() if value in (100, 1000)] == [100, 1000]
    narrow = Scale(low=0.7, high=1.6, begin=0, end=100, log=True)
    assert len(narrow.ticks()) > 2
    assert not frame.up([10.0, 20.0], log=True).log
    assert frame.up([]).high > 0


def test_names_stay_apart_and_inside() -> None:
    assert apart([10, 11, 12], 14, 200) == [10, 24, 38]
    assert apart([199, 198, 20], 14, 200) == [200, 186, 20]


def test_numbers_are_written_as_people_write_them() -> None:
    assert [plain(v) for v in (0, 0.00123, 0.4567, 4.567, 45.67, 4567.8)] == [
        *("0", "0.0012", "0.457", "4.57", "45.7", "4,568"),
    ]
    assert plain(None) == plain(float("nan")) == "\N{EN DASH}"
    assert plain(-2.5) == "\N{MINUS SIGN}2.50"
    assert short(0.5) == "0.5"
    assert valued(1234.0, "ms") == "1.23 s"
    assert ranged(0.5, 0.25, 0.75, "share") == "50 % (25 % to 75 %)"
    row: dict[str, object] = {"kind": "difference", "value": 0.1, "low": -0.1, "high": 0.3}
    assert times(row) == "+0.100 (\N{MINUS SIGN}0.100 to +0.300)"


def test_markup_escapes_all_but_its_own() -> None:
    inside = tag("b", "1 < 2", class_='a"b', hidden=True, title=None)
    assert inside == '<b class="a&quot;b" hidden>1 &lt; 2</b>'
    assert tag("p", inside, x=1.0) == f'<p x="1">{inside}</p>'


# ---- in a browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    result = lab_results.result(fractions=(0.5, 0.95))
    # What a page costs a browser grows with its tables: some rows of each are enough.
    shown = ("output_tok_s", "ttft_p99_ms")
    result["comparisons"] = [row for row in result["comparisons"] if row["figure"] in shown]
    result |= {name: result[name][:6] for name in ("runs", "timelines")}
    report.write(result, path)
    return path.as_uri()


def test_nobody_is_shut_out(browser: Browser, address: str) -> None:
    with watched_page(browser, width=900, theme="light") as page:
        page.goto(address)
        beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(beyond) == 0
        mark = page.locator("#ttft [data-says]").first
        says = mark.get_attribute("data-says")
        mark.scroll_into_view_if_needed()
        mark.hover()
        assert page.locator("#says").text_content() == says
        # Tables are alike, and each open one costs axe half a second.
        for shown in (".evidence", ".numbers", ".piece details", "#ground .numbers"):
            page.locator(shown).first.evaluate("(one) => (one.open = true)")
        page.evaluate(AXE)
        assert not page.evaluate(FAULTS, {})
        assert page.evaluate(beyond) == 0
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 1440, "height": 900})
        assert not page.evaluate(FAULTS, {"runOnly": OF_COLOUR})
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert page.evaluate(beyond) == 0


def test_without_a_script_everything_is_there(browser: Browser, address: str) -> None:
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": 1200, "height": 800}
    )
    page = context.new_page()
    page.goto(address)
    drawn = page.locator("figure svg[role=img]")
    assert drawn.count() >= 20
    for place in range(drawn.count()):
        box = drawn.nth(place).bounding_box()
        assert box
        assert box["width"] > 300
        assert box["height"] > 60
    assert page.locator("#ttft [data-says] > title").count() > 0
    page.emulate_media(media="print")
    assert page.locator("#verdicts pre.sql").first.is_visible()
    assert not page.locator("nav").is_visible()
    context.close()
