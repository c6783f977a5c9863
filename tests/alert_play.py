"""Faults as promtool's unit tests: series written out minute by minute, and who is to be called.

Owns the timeline (healthy, sick, healthy again, on one of two engines) and the expectations at
its instants; tests/test_alerts.py hands both to promtool. At each instant every alert that is not
expected must be silent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana.alert_files import RUNBOOKS_URL
from grafana.alert_spec import Alert
from grafana.alerts import ALERTS
from tests.alert_cases import ENGINE, HEALTHY, Fault, Value, Values

BESIDE = ENGINE | {"model_name": "mistral", "engine": "1"}
"""Another engine of the same server, which is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some minutes of a server's life; `anew` if it was started again at their begin."""

    minutes: int
    values: Values
    anew: bool = False


def series(labels: Mapping[str, str], phases: Sequence[Phase], every: int) -> list[dict[str, str]]:
    """Return the input series of one engine."""
    names = dict.fromkeys(name for phase in phases for name in phase.values)
    found = []
    for name in names:
        metric, _, own = name.partition("{")
        target = {k: v for k, v in labels.items() if metric != "up" or k in ("job", "instance")}
        text = ",".join(
            [*(f'{k}="{v}"' for k, v in target.items()), *filter(None, [own.strip("}")])]
        )
        parts = _samples(metric, [(p, p.values.get(name)) for p in phases], every)
        found.append({"series": f"{metric}{{{text}}}", "values": " ".join(parts)})
    return found


def _samples(
    metric: str, phases: Sequence[tuple[Phase, Value | tuple[float, ...]]], every: int
) -> Iterator[str]:
    counter = metric.endswith("_total")
    level = 1.0 if metric == "iterscope_engine_starts_total" else 0.0
    first = phases[0][1]
    assert first is None or isinstance(first, int | float)
    yield "_" if first is None else f"{level if counter else first:.6f}"
    for phase, value in phases:
        count = phase.minutes // every
        level = 0.0 if phase.anew else level
        if value is None:
            yield f"stale _x{count - 1}" if count > 1 else "stale"
        elif isinstance(value, tuple):
            yield " ".join(f"{one:.6f}" for one in value)
        elif counter and value:
            # One by one: promtool's own sums lose a digit, and a counter that falls was reset.
            grown = [level + value * every * sample for sample in range(1, count + 1)]
            yield " ".join(f"{one:.6f}" for one in grown)
            level = grown[-1]
        else:
            yield f"{level if counter else value:.6f}+0x{count - 1}"


def fires(fault: Fault) -> dict[str, Any]:
    """Return the test that a fault's alert, and no other, fires at its end, and clears."""
    (alert,) = [one for one in ALERTS if _is(one, fault)]
    end = fault.before + fault.minutes
    told = {fault.alert: [_told(fault, alert)]}
    instants: list[tuple[int, Mapping[str, Any]]] = [(fault.before, {})]
    if alert.for_s >= 120 * fault.every:
        instants.append((fault.before + fault.every, {}))
    instants += [(end, told), (end + fault.clears_within, {})]
    calm = _life(fault, {} if fault.other is None else fault.other, fault.minutes)
    found = series(ENGINE, _life(fault, fault.sick, fault.minutes), fault.every)
    beside = series(BESIDE, calm, fault.every)
    found += [one for one in beside if not one["series"].startswith("up")]  # its server's, once
    return _test(f"{fault.alert} fires", fault.every, found, _expected(instants, fault.also))


def near_misses(faults: Sequence[Fault]) -> Iterator[dict[str, Any]]:
    """Yield tests of fleets in which every server nearly has a fault: nobody is called, ever."""
    alone = [fault for fault in faults if fault.other is not None]
    together = [fault for fault in faults if fault.other is None]
    for fleet in (*([fault] for fault in alone), *_alike(together)):
        found, minutes = [], 0
        for fault in fleet:
            for number, near in enumerate(fault.near):
                name = f"{fault.alert.lower()}-{number}"
                labels = ENGINE | {"instance": f"{name}:8000", "model_name": name}
                phases = _life(fault, near, fault.near_minutes or fault.minutes)
                found += series(labels, phases, fault.every)
                minutes = max(minutes, sum(phase.minutes for phase in phases))
        every = fleet[0].every
        instants = [(minute, {}) for minute in range(0, minutes, every)]
        yield _test(f"near misses each {every} min", every, found, _expected(instants))


def _alike(faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yield the faults that one timeline can hold together."""
    for every in dict.fromkeys(fault.every for fault in faults):
        yield [fault for fault in faults if fault.every == every]


def quiet(name: str, *phases: Phase) -> dict[str, Any]:
    """Return the test that nobody is called in a life, looked at each five minutes."""
    minutes = sum(phase.minutes for phase in phases)
    instants = [(minute, {}) for minute in range(0, minutes + 1, 5)]
    return _test(name, 1, series(ENGINE, phases, 1), _expected(instants))


def _is(alert: Alert, fault: Fault) -> bool:
    ours = dict(alert.labels).items() <= fault.labels.items()
    return alert.name == fault.alert and ours


def _told(fault: Fault, alert: Alert) -> dict[str, Any]:
    address = "http://a:8000" if "a:8000" in fault.says else "URL"
    window = f" -p last_s={alert.last_s}" if alert.last_s else ""
    words = {
        "summary": fault.says,
        "first_look": f"iterscope sql --url {address} --query {alert.query}{window}",
        "runbook_url": f"{RUNBOOKS_URL}/{fault.alert}.md",
    }
    return {"exp_labels": dict(fault.labels), "exp_annotations": words}


def _life(fault: Fault, values: Values, minutes: int) -> list[Phase]:
    return [
        Phase(minutes=fault.before, values=HEALTHY),
        Phase(minutes=minutes, values=HEALTHY | values),
        Phase(minutes=fault.clears_within + 2 * fault.every, values=HEALTHY),
    ]


def _test(
    name: str, every: int, found: list[dict[str, str]], expected: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "name": name,
        "interval": f"{every}m",
        "input_series": found,
        "alert_rule_test": expected,
    }


def _expected(
    instants: Sequence[tuple[int, Mapping[str, Any]]], may_fire: Sequence[str] = ()
) -> list[dict[str, Any]]:
    names = dict.fromkeys(alert.name for alert in ALERTS if alert.name not in may_fire)
    return [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": told.get(name, [])}
        for minute, told in instants
        for name in names
    ]
