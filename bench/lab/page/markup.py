"""HTML and SVG as text that cannot be broken out of: tags, attributes, and what stands in them.

Owns escaping. Every module under bench/lab/page builds its markup with `tag`; a plain text becomes
characters, only Safe passes as it is. What people cannot see, and what turns a line around, is
written as its code, so that a tenant's name shows what it is. Knows no result.
"""

import html
import re
from collections.abc import Iterable

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
VOID = frozenset({"meta", "br", "link"})


class Safe(str):
    """Markup that is finished."""

    __slots__ = ()


Child = Safe | str | float | None | Iterable[Safe]
Attribute = str | float | bool | None


def text(value: object) -> Safe:
    """Return any value as characters of a page."""
    whole = str(value).encode("utf-8", "replace").decode()
    return Safe(html.escape(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", whole)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Safe:
    """Return an element; `class_` is class, `stroke_width` stroke-width, None and False are none.

    A number in an attribute has two digits after the point: a hundredth of a pixel.
    """
    head = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Safe(f"<{head}>")
    return Safe(f"<{head}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Safe:
    """Return children one after the other."""
    return Safe("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Safe):
        return child
    if isinstance(child, str | int | float):
        return text(child)
    return "".join(child)


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = number(value) if isinstance(value, float) else text(value)
    return f' {name}="{shown}"'


def number(value: float) -> str:
    """Return a coordinate, as short as it can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def points(places: Iterable[tuple[float, float]]) -> str:
    """Return coordinates as SVG has them."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in places)
