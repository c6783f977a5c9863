"""Two channels, one order: ends after their last iteration, starts before the first, none lost."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Report
from server.publication import Publication
from telemetry.records import Fault, Iteration, Record, RequestEnd, RequestStart
from tests.simulation import Simulation


def recorded() -> Simulation:
    simulation = Simulation(max_num_seqs=2)
    for name in "ABCDEFG":
        simulation.add(name, 8, 3)
        simulation.step(2)
    simulation.drain()
    return simulation


def reports_of(simulation: Simulation) -> list[Report]:
    """Return one report a step, as the outbox sends them: starts before, ends after a step."""
    reports = []
    iterations = simulation.emitted.iterations
    ends = {end.request: end for end in simulation.emitted.ends}
    starts = list(simulation.emitted.starts)
    for record in iterations:
        early = [start for start in starts if start.arrived_at_ns <= record.end_at_ns]
        early = [start for start in early if start.arrived_at_ns <= record.begin_at_ns + 1]
        if early:
            starts = [start for start in starts if start not in early]
            reports.append(Report(after_step=record.step - 1, starts=early))
        ended = [ends[number] for number in record.finished]
        reports.append(Report(after_step=record.step, ends=ended))
    assert not starts
    return reports


@given(picks=st.lists(st.booleans(), max_size=200), lost=st.sets(st.integers(1, 12)))
def test_any_interleaving_gives_a_lawful_order(picks: list[bool], lost: set[int]) -> None:
    simulation = recorded()
    published: list[Record] = []
    publication = Publication(lambda record, payload: published.append(record))
    last = simulation.emitted.iterations[-1].step
    records = [record for record in simulation.emitted.iterations if record.step not in lost]
    reports = [
        replace_lost(report, lost) if report.after_step in lost else report
        for report in reports_of(simulation)
    ]
    order = iter(picks)
    while records or reports:
        if records and (not reports or next(order, True)):
            record = records.pop(0)
            publication.iteration(record, msgspec.json.encode(record))
        else:
            publication.report(reports.pop(0))
    publication.close()
    assert_order(published, lost)
    assert sum(isinstance(record, Iteration) for record in published) == last - len(
        lost & set(range(1, last + 1))
    )
    assert sum(isinstance(record, RequestEnd) for record in published) == 7
    assert sum(isinstance(record, RequestStart) for record in published) == 7


def replace_lost(report: Report, lost: set[int]) -> Report:
    del lost
    return Report(
        after_step=report.after_step,
        lost_through_step=report.after_step,
        starts=list(report.starts),
        ends=list(report.ends),
    )


def assert_order(published: list[Record], lost: set[int]) -> None:
    started: set[int] = set()
    ended: set[int] = set()
    steps: list[int] = []
    for record in published:
        if isinstance(record, RequestStart):
            started.add(record.request)
        elif isinstance(record, Iteration):
            assert started.issuperset(record.admitted), "a tile before its request's start"
            assert not ended.intersection(record.requests) or lost, "a tile after the end"
            steps.append(record.step)
        elif isinstance(record, RequestEnd):
            assert record.request in started
            ended.add(record.request)
    assert steps == sorted(steps)


def test_an_end_waits_for_its_iteration() -> None:
    simulation = recorded()
    record = replace(simulation.emitted.iterations[0], step=5, admitted=[])
    end = simulation.emitted.ends[0]
    published: list[Record] = []
    publication = Publication(lambda record, payload: published.append(record))
    publication.report(Report(after_step=5, ends=[end]))
    assert published == []
    publication.iteration(record, b"{}")
    assert published == [record, end]


def test_an_end_does_not_wait_for_a_lost_iteration() -> None:
    end = recorded().emitted.ends[0]
    published: list[Record] = []
    publication = Publication(lambda record, payload: published.append(record))
    publication.report(Report(after_step=5, lost_through_step=5, ends=[end]))
    assert published == [end]


def test_a_start_that_was_merged_late_is_told_before_its_admission() -> None:
    """The control channel was full: one report holds the start and is numbered after the step."""
    simulation = recorded()
    first = simulation.emitted.iterations[0]
    start = simulation.emitted.starts[0]
    fault = Fault(fault_at_ns=1, step=1, where="engine step", error="x", traceback="")
    published: list[Record] = []
    publication = Publication(lambda record, payload: published.append(record))
    publication.iteration(first, b"{}")
    assert published == []
    publication.report(Report(after_step=1, starts=[start], faults=[fault]))
    assert published == [start, first, fault]
