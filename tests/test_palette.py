"""The page's colours: readable on their grounds, and told apart by colour-blind eyes too.

Owns the proof over dashboard/style.css, in both themes. Colours are simulated as people with two
kinds of cones see them (Machado, Oliveira and Fernandes 2009); where two marks come close, their
shapes differ, and those pairs are named here one by one.
"""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

STYLE = Path(__file__).resolve().parent.parent / "dashboard" / "style.css"
MARKS = ("prefill", "decode", "kv", "wait", "preempted", "held", "recompute")
GROUNDS = ("bg", "surface")
TOLD_APART = 19.0  # CIE76; a just noticeable difference is 2.3
SHAPES_TELL = {
    frozenset(pair)
    for pair in (
        ("preempted", "held"),  # cross-hatch against hollow
        ("prefill", "decode"),  # block against tick
        ("kv", "wait"),  # hatch against dots or bars
        ("prefill", "preempted"),  # block against cross-hatch
        ("wait", "recompute"),  # dots or bars against a striped block
        ("decode", "preempted"),  # tick against cross-hatch
        ("decode", "held"),  # tick against hollow
    )
}
LEAST_APART = 8.0  # even where shapes differ

BLIND = {
    "none": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}

Floats = npt.NDArray[np.float64]


def palette(theme: str) -> dict[str, Floats]:
    """Return the theme's colours, linear RGB from 0 to 1."""
    text = STYLE.read_text(encoding="utf-8")
    found = re.search(rf'data-theme="{theme}"\] \{{(.*?)\n\}}', text, re.DOTALL)
    assert found
    named = re.findall(r"--([\w-]+): #([0-9a-f]{6});", found[1])
    return {name: linear(value) for name, value in named}


def linear(hexadecimal: str) -> Floats:
    shares = np.array([int(hexadecimal[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def contrast(one: Floats, other: Floats) -> float:
    """Return the contrast ratio of WCAG 2."""
    high, low = sorted((float(c @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(colour: Floats) -> Floats:
    xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ) @ np.clip(colour, 0, 1)
    shares = xyz / [0.9505, 1.0, 1.089]
    f = np.where(shares > 0.008856, np.cbrt(shares), 7.787 * shares + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def seen(colour: Floats, blindness: str) -> Floats:
    return np.asarray(BLIND[blindness] @ colour)


def distance(one: Floats, other: Floats, blindness: str) -> float:
    return float(np.linalg.norm(lab(seen(one, blindness)) - lab(seen(other, blindness))))


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("blindness", list(BLIND))
def test_marks_are_told_apart(theme: str, blindness: str) -> None:
    colours = palette(theme)
    close = {}
    for one, other in combinations(MARKS, 2):
        apart = distance(colours[one], colours[other], blindness)
        least = LEAST_APART if frozenset((one, other)) in SHAPES_TELL else TOLD_APART
        if apart < least:
            close[one, other] = round(apart, 1)
    assert not close, f"{theme}, {blindness}: {close}"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_words_and_marks_stand_out_from_their_grounds(theme: str) -> None:
    colours = palette(theme)
    for ground in (*GROUNDS, "raised"):
        for name in ("text", "muted", "faint", "good", "warn", "bad"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for ground in GROUNDS:
        for name in MARKS:
            if (theme, name) == ("light", "recompute"):
                continue  # its ink stripes carry it
            assert contrast(colours[name], colours[ground]) >= 3, (name, ground)
    assert contrast(colours["ink"], colours["recompute"]) >= 4.5
    for wash in ("wash-bad", "wash-warn"):
        assert contrast(colours["text"], colours[wash]) >= 4.5, wash


def test_the_simulation_knows_red_from_green() -> None:
    red, green = linear("cc3311"), linear("668800")
    assert distance(red, green, "none") > 2 * distance(red, green, "deutan")
    assert contrast(linear("ffffff"), linear("000000")) == pytest.approx(21)
