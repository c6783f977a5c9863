"""The Trace Event Format, written down from its specification, as a check of a whole document.

Owns what a viewer relies on: which phases carry which fields, durations that are not negative,
slices of one thread that nest, counters that move forward in time, flows that come in pairs and
each bind to a slice. Knows nothing of Iterscope; test_perfetto.py applies it to our traces.
"""

from collections import defaultdict
from typing import Any

Slices = dict[tuple[int, int], list[tuple[int, int, str]]]

FIELDS: dict[str, set[str]] = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts"},
}
META = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check_trace(document: Any) -> Slices:
    """Fail on the first event that breaks the format; return the slices in ns by lane, by begin."""
    assert isinstance(document, dict)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    for event in events:
        _check_event(event)
    slices = _slices(events)
    for lane, found in slices.items():
        _check_nesting(lane, found)
    _check_counters(events)
    _check_flows(events, slices)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert slices.keys() <= named, "a lane without a name"
    return slices


def ns(us: float) -> int:
    """Return whole nanoseconds; times are written in us with three decimals at most."""
    whole = round(us * 1000)
    assert abs(us * 1000 - whole) < 0.01, f"{us} us is no whole number of ns"
    return whole


def _check_event(event: dict[str, Any]) -> None:
    wanted = FIELDS[event["ph"]]
    assert wanted <= event.keys(), f"{event} lacks {wanted - event.keys()}"
    assert isinstance(event["name"], str)
    assert event["name"]
    assert all(isinstance(event[key], int) for key in ("pid", "tid") if key in event)
    if "ts" in event:
        assert ns(event["ts"]) >= 0, event
    if event["ph"] == "X":
        assert ns(event["dur"]) > 0, event
    if event["ph"] == "M":
        assert event["name"] in META
    if event["ph"] == "C":
        assert event["args"]
        assert all(isinstance(value, int | float) for value in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in ("g", "p", "t")


def _slices(events: list[dict[str, Any]]) -> Slices:
    slices: Slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = ns(event["ts"])
            lane = (event["pid"], event["tid"])
            slices[lane].append((begin, begin + ns(event["dur"]), event["name"]))
    for found in slices.values():
        found.sort(key=lambda part: (part[0], -part[1]))
    return slices


def _check_nesting(lane: tuple[int, int], found: list[tuple[int, int, str]]) -> None:
    open_until: list[int] = []
    for begin, end, name in found:
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{name} of {lane} crosses its parent's end"
        open_until.append(end)


def _check_counters(events: list[dict[str, Any]]) -> None:
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] == "C":
            key = (event["pid"], event["name"])
            assert event["ts"] >= last.get(key, 0.0), f"{key} goes back in time"
            last[key] = event["ts"]


def _check_flows(events: list[dict[str, Any]], slices: Slices) -> None:
    flows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["cat"], event["id"]].append(event)
            lane, at = slices[event["pid"], event["tid"]], ns(event["ts"])
            assert any(begin <= at < end for begin, end, _ in lane), f"{event} binds to no slice"
    for (_, number), pair in flows.items():
        assert isinstance(number, int), "viewers take numbers alone"
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"]
        assert pair[1]["bp"] == "e", "binds to the slice around it, not to the next one"
