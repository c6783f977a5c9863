"""What a search found, as one JSON value and as lines for a person.

Owns the form of `iterscope tune --json` and the words of its answer: what it would set, against
what there was, with intervals, and why. tune_command.py calls it. Recommends nothing that chance
explains.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.lab.page.numbers import counted, plain, ranged, times, valued
from bench.lab.tune import NUMBERS, Found, Setting, counting, is_better, mean_figure, proof, rank
from bench.lab.tune_reasons import binding, in_words

FORM = "iterscope-tune-1"
UNSTEADY = 0.25
FIGURES = (
    ("goodput_requests_s", "in time", "requests/s"),
    ("goodput_share", "share", "share"),
    ("ttft_p99_ms", "first token p99", "ms"),
    ("tpot_p99_ms", "per token p99", "ms"),
    ("itl_p99_ms", "gap p99", "ms"),
    ("output_tok_s", "tokens", "tokens/s"),
)


def told(found: Found, ground: dict[str, Any]) -> dict[str, Any]:
    """Return the result."""
    against = proof(found)
    better = is_better(found)
    chosen = found.best if better and found.best is not None else found.base
    settings = [one for one in found.trials if found.trials[one]]
    settings.sort(key=lambda one: rank(found, one), reverse=True)
    compared = {
        "figure": "goodput_requests_s",
        **{name: getattr(against, name) for name in ("kind", "pairs", "value", "low", "high", "p")},
        "significant": against.significant,
    }
    whys = {
        name: binding(counting(found, one))
        for name, one in (("base", found.base), ("best", found.best or found.base))
    }
    return {
        "form": FORM,
        "slo": {"ttft_ms": found.slo.ttft_ms, "tpot_ms": found.slo.tpot_ms},
        **ground,
        "notes": [*ground.get("notes", []), *_unsteady(found)],
        "runs": found.runs(),
        "out_of_time": found.out_of_time,
        "stopped": found.stopped,
        "base": _setting(found.base),
        "best": None if found.best is None else _setting(found.best),
        "better": better,
        "set": list(chosen.flags),
        "compared": compared,
        "why": {name: why | {"says": in_words(why)} for name, why in whys.items()},
        "settings": [_tried(found, one) for one in settings],
    }


def _unsteady(found: Found) -> Iterator[str]:
    """Yield a warning where one setting was served so unlike itself that little can be told."""
    shares = [trial.share for trial in found.trials.get(found.base, {}).values()]
    if shares and max(shares) - min(shares) > UNSTEADY:
        low, high = valued(min(shares), "share"), valued(max(shares), "share")
        yield (
            f"{found.base} itself served {low} to {high} in time from round to round: rounds are "
            "too short, or others use this machine"
        )


def _setting(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in NUMBERS}


def _tried(found: Found, setting: Setting) -> dict[str, Any]:
    figures = {}
    for name, _, _ in FIGURES:
        mean = mean_figure(found, setting, name)
        if mean is not None:
            figures[name] = {"mean": mean.value, "low": mean.low, "high": mean.high}
    rounds = sorted(found.trials[setting])
    return {"setting": _setting(setting), "rounds": rounds, "figures": figures} | {
        "binding": binding(counting(found, setting)),
        "trials": [msgspec.to_builtins(found.trials[setting][number]) for number in rounds],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the result."""
    console.print(_table(result))
    for line in lines(result):
        console.print(line, soft_wrap=True, markup=False)


def _table(result: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in ("seqs", "tokens", "chunks", "runs", *(title for _, title, _ in FIGURES)):
        table.add_column(head, justify="right")
    for row in result["settings"]:
        setting = row["setting"]
        cap = setting["long_prefill_tokens"]
        mark = "*" if setting == result["base"] else ""
        cells = [f"{mark}{setting['max_num_seqs']}", str(setting["max_num_batched_tokens"])]
        cells += ["no cap" if cap is None else str(cap), str(len(row["rounds"]))]
        for name, _, unit in FIGURES:
            cells.append(valued((row["figures"].get(name) or {}).get("mean"), unit))
        table.add_row(*cells)
    return table


def lines(result: dict[str, Any]) -> list[str]:
    """Return the answer in words."""
    slo, compared = result["slo"], result["compared"]
    rate = plain(float(f"{result['rate_requests_s']:.3g}"))
    said = [
        f"* what it began with; {rate} requests/s, first token within "
        f"{valued(slo['ttft_ms'], 'ms')}, then {valued(slo['tpot_ms'], 'ms')} a token"
    ]
    pairs = counted(compared["pairs"], "pair") + " of runs"
    change = f"{times(compared)} as many requests in time, {pairs}"
    if compared["kind"] != "ratio":
        change = f"{times(compared)} requests/s in time, {pairs}"
    if result["better"]:
        said.append(f"would set  {' '.join(result['set'])}")
        said.append(f"           {change} after the search")
    else:
        said.append(f"would keep {' '.join(result['set'])}")
        said.append("           " + _kept(result, change))
    for name, what in (("base", "begun with"), ("best", "best found")):
        if name == "base" or result["best"] not in (None, result["base"]):
            said.append(f"{what}: {_good(result, name)}; {result['why'][name]['says']}")
    if result["stopped"]:
        said.append("stopped; this is what had run until then")
    elif result["out_of_time"]:
        said.append("time was out before the proof was done: give it more with --minutes")
    return said + [f"- {note}" for note in result["notes"]]


def _kept(result: dict[str, Any], change: str) -> str:
    if result["best"] is None and result["stopped"]:
        return "no other setting had run"
    if result["best"] is None:
        return "no search took place in the time it had"
    best = Setting(**result["best"])
    if not result["compared"]["pairs"]:
        return f"the best other ({best}) was not compared with it: no round of proof took place"
    return f"the best other ({best}) is not better beyond chance: {change}"


def _good(result: dict[str, Any], name: str) -> str:
    for row in result["settings"]:
        if row["setting"] == result[name]:
            figure = row["figures"].get("goodput_requests_s") or {}
            low, high = figure.get("low"), figure.get("high")
            return f"{ranged(figure.get('mean'), low, high, 'requests/s')} in time"
    return "never ran"
