"""Explanations as people read them, whole texts, and the shape that programs rely on.

GIVEN a small planted life on the real core, THEN the text in golden/explain/: figures are exact,
since the clock is a fake. `python -m tests.test_explain_text` writes the files anew; they are
reviewed like code.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from server.explain_text import explanation_text
from telemetry.explain_case import Case, case_from_bus
from telemetry.explanation import NAMED_MAX, explain
from telemetry.records import CAUSES
from tests.lives import published
from tests.planted import PLANTS

GOLDEN = Path(__file__).parent / "golden" / "explain"
SHOWN = ("neighbour_prefill", "preempted_kv", "queue_kv", "batch_held", "unexplained")


def planted(cause: str) -> Case:
    plant = PLANTS[cause]()
    case = case_from_bus(plant.emit.bus, plant.request_id)
    assert case is not None
    return case


@pytest.mark.parametrize("cause", SHOWN)
def test_the_whole_text(cause: str) -> None:
    text = explanation_text(explain(planted(cause)))
    assert text == (GOLDEN / f"{cause}.txt").read_text(encoding="utf-8")


def test_a_narrow_terminal_cuts_the_meanings_alone() -> None:
    wide, narrow = (explanation_text(explain(planted("queue_kv")), width) for width in (None, 76))
    cut = [line for line in narrow.splitlines() if line not in wide.splitlines()]
    assert cut
    assert all(len(line) <= 76 and line.split()[0] in CAUSES for line in cut)


def test_the_shape_that_programs_rely_on() -> None:
    body = explain(planted("neighbour_prefill"))
    assert (body["request_id"], body["external_id"], body["state"]) == ("req-A", None, "finished")
    assert {"e2e_ms", "ttft_ms", "causes", "timeline", "gaps", "matches"} <= body.keys()
    assert [part["cause"] for part in body["causes"]] == [
        cause for cause in CAUSES if any(part["cause"] == cause for part in body["causes"])
    ]
    assert sum(part["ms"] for part in body["causes"]) == pytest.approx(body["e2e_ms"], abs=1e-6)
    (neighbour,) = next(p for p in body["causes"] if p["cause"] == "neighbour_prefill")["requests"]
    assert (neighbour["request_id"], neighbour["tokens"]) == ("req-B", 100)
    assert [event["event"] for event in body["timeline"]][:4] == [
        "received",
        "submitted",
        "arrived",
        "admitted",
    ]


def test_gaps_sum_to_the_time_between_first_and_last_token() -> None:
    body = explain(planted("preempted_kv"))
    assert len(body["gaps"]) == body["output_tokens"] - 1
    first = next(event for event in body["timeline"] if event["event"] == "first_token")
    last = body["gaps"][-1]["at_ms"]
    assert sum(gap["ms"] for gap in body["gaps"]) == pytest.approx(last - first["at_ms"], abs=1e-6)
    for gap in body["gaps"]:
        assert sum(part["ms"] for part in gap["causes"]) == pytest.approx(gap["ms"], abs=1e-6)
    longest = max(body["gaps"], key=lambda gap: gap["ms"])
    assert "preempted_kv" in [part["cause"] for part in longest["causes"]]


def test_the_first_token_of_a_stream_is_divided() -> None:
    simulation, emit = published(max_num_seqs=1)
    emit.deliver = False
    simulation.add("A", 8, 4)
    simulation.add("B", 8, 4, stream=True)
    simulation.drain()
    end = emit.ends[2]
    assert end.first_token_at_ns is not None
    first_write = end.first_token_at_ns + 5_000
    emit.publish_delivery(end, first_write_at_ns=first_write)
    case = case_from_bus(emit.bus, "req-B")
    assert case is not None
    body = explain(case)
    assert body["ttft"]["ms"] == body["ttft_ms"]
    causes = {part["cause"]: part["ms"] for part in body["ttft"]["causes"]}
    assert sum(causes.values()) == pytest.approx(body["ttft_ms"], abs=1e-6)
    assert causes.keys() == {"tokenize", "step_boundary", "queue_seqs", "own_prefill", "output"}
    assert causes["output"] == pytest.approx(0.005)


def test_a_live_request_is_told_so_far() -> None:
    simulation, emit = published()
    simulation.add("A", 8, 20)
    simulation.step(4)
    case = case_from_bus(emit.bus, "req-A")
    assert case is not None
    body = explain(case)
    assert (body["state"], body["finish"], body["output_tokens"]) == ("running", None, 4)
    assert sum(part["ms"] for part in body["causes"]) == pytest.approx(body["e2e_ms"], abs=1e-6)
    assert "so far" in explanation_text(body)


def test_many_neighbours_are_counted_beyond_the_worst() -> None:
    simulation, emit = published(
        max_num_seqs=80, max_num_batched_tokens=400, kv_blocks=300, max_model_len=512
    )
    simulation.add("A", 8, 12)
    for number in range(70):
        simulation.add(f"n{number}", 5, 5)
    simulation.drain()
    case = case_from_bus(emit.bus, "req-A")
    assert case is not None
    part = next(p for p in explain(case)["causes"] if p["cause"] == "neighbour_decode")
    assert len(part["requests"]) == NAMED_MAX
    assert part["more"]["requests"] == 20
    named = sum(one["ms"] for one in part["requests"]) + part["more"]["ms"]
    assert named == pytest.approx(part["ms"], abs=1e-4)


def test_names_of_strangers_are_only_text() -> None:
    case = planted("own_decode")
    start = replace(case.start, external_id="\x1b[2J\nevil")
    text = explanation_text(explain(replace(case, start=start)))
    assert "\x1b" not in text
    assert "\\x1b[2J\\x0aevil" in text


def test_what_the_fold_told_stands_where_iterations_are_gone() -> None:
    case = planted("own_decode")
    told = {"own_decode": 7_000_000, "unexplained": 1_000_000}
    body = explain(replace(case, whole=False, told=told))
    assert not body["complete"]
    assert [(p["cause"], p["ms"]) for p in body["causes"]] == [
        ("own_decode", 7.0),
        ("unexplained", 1.0),
    ]


if __name__ == "__main__":
    for shown in SHOWN:
        golden = GOLDEN / f"{shown}.txt"
        golden.write_text(explanation_text(explain(planted(shown))), encoding="utf-8")
