"""Stop strings: where the text ends, whatever way it was cut into tokens.

Owns the matching of one sequence's stop strings over its growing text; used by
server/generation.py. Text that could still be the beginning of a stop string is held back, so no
part of a match is ever written. The result depends on the text alone, never on how it arrived.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A place in the tree of stop strings: the text that leads here is the longest one alive."""

    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    match_chars: int = 0  # the longest stop string that ends here


def _grow(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.match_chars = len(stop)
    level = list(root.children.values())
    for node in level:
        node.fallback = root
    for node in level:  # grows while it is read: breadth first
        for char, child in node.children.items():
            child.fallback = _follow(node.fallback, char) or root
            child.match_chars = child.match_chars or child.fallback.match_chars
            level.append(child)
    return root


def _follow(node: "_Node | None", char: str) -> "_Node | None":
    while node is not None:
        if char in node.children:
            return node.children[char]
        node = node.fallback
    return None


class StopStrings:
    """Aho and Corasick's automaton over one text; each character costs the same, however many.

    The text is cut before the earliest place where any stop string begins. When a match is
    complete while one that began earlier is still possible, the earlier one is waited for: so the
    cut is the same as that of a search in the whole text.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops)
        self._root = _grow(stops)
        self._node = self._root
        self._held = ""
        self._start: int | None = None  # in `_held`: where the earliest complete match begins

    def add(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be written now, and whether a stop string was met.

        After True nothing more may be added, and what was held back is gone.
        """
        seen = len(self._held)
        self._held += text
        for position, char in enumerate(text, seen + 1):
            node = self._node = _follow(self._node, char) or self._root
            if node.match_chars:
                start = position - node.match_chars
                if self._start is None or start < self._start:
                    self._start = start
            if self._start is not None and position - node.depth >= self._start:
                return self._held[: self._start], True
        return self._release(len(self._held) - self._node.depth), False

    def finish(self) -> tuple[str, bool]:
        """Return the rest when the text has ended, cut at a match that was still in doubt."""
        if self._start is not None:
            return self._held[: self._start], True
        return self._release(len(self._held)), False

    def _release(self, count: int) -> str:
        if self._start is not None:
            count = min(count, self._start)
            self._start -= count
        written, self._held = self._held[:count], self._held[count:]
        return written
