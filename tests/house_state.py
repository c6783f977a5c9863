"""The rules about state as functions: what a module may keep, what may change, who may change it.

Owns the checks of module-level state, of mutable classes against ARCHITECTURE.md's table, and of
stores into objects that have one writer. Used as house_rules.py is; reads no files itself.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house_rules import call_name, walk_functions

BUILDERS = frozenset({"list", "dict", "set", "bytearray"})
STATEFUL = frozenset(
    {"Lock", "RLock", "Event", "Condition", "Semaphore", "Queue", "SimpleQueue", "Thread"}
    | {"deque", "defaultdict", "OrderedDict", "Counter", "local", "ContextVar", "count", "cycle"}
)
WORK = frozenset(
    {"open", "read_text", "read_bytes", "run", "Popen", "connect", "glob", "rglob", "walk"}
)
MUTATORS = frozenset(
    {"append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "reverse", "setdefault", "sort", "update"}
)
QUIET_CALLS = frozenset(
    {"TypeVar", "TypeVarTuple", "ParamSpec", "NewType", "namedtuple", "getLogger"}
    | {"attrgetter", "itemgetter", "methodcaller", "partial"}
)
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
TABLE_NAME = re.compile(r"_?[A-Z][A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of ARCHITECTURE.md's table: a mutable class, its module, and its one writer.

    A writer that is too long for one file names its parts: `writers` are modules.
    """

    name: str
    module: str
    writers: tuple[str, ...]


# ---- what a module may keep


def module_state(path: str, source: str) -> Iterator[str]:
    """Find state and work at module level: only constants and tables in CAPITALS may stand there.

    A table is filled where it is defined and never after; `changed_tables` sees to that.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.For | ast.While | ast.With | ast.AugAssign | ast.Delete):
            yield f"{path}:{node.lineno}: work at import"
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield f"{path}:{node.lineno}: work at import: {ast.unparse(node)[:50]}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from _kept(path, ast.unparse(target), node.value)


def _kept(path: str, name: str, value: ast.expr) -> Iterator[str]:
    calls = {call_name(part) for part in ast.walk(value) if isinstance(part, ast.Call)}
    table = name.startswith("__") or all(map(TABLE_NAME.fullmatch, re.findall(r"[\w.]+", name)))
    where = f"{path}:{value.lineno}: {name}"
    if calls & STATEFUL:
        yield f"{where} is module-level state ({min(calls & STATEFUL)})"
    elif calls & WORK:
        yield f"{where} does work at import ({min(calls & WORK)})"
    elif not table and (isinstance(value, CONTAINERS) or calls & BUILDERS):
        yield f"{where} is mutable at module level; a table that never changes has a NAME_LIKE_THIS"
    elif not table and isinstance(value, ast.Call) and not calls & QUIET_CALLS:
        yield f"{where} is an object made at import"


def changed_tables(path: str, source: str) -> Iterator[str]:
    """Find what would turn a constant or a module into state: changed tables, global, caches."""
    for node, _ in walk_functions(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Global):
            yield f"{path}:{line}: global {', '.join(node.names)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS and _is_table(node.func.value):
                yield f"{path}:{line}: {ast.unparse(node.func)} changes a table"
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _is_table(node.value):
                yield f"{path}:{line}: {ast.unparse(node)} changes a table"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _endless_caches(path, node)


def _is_table(value: ast.expr) -> bool:
    name = value.attr if isinstance(value, ast.Attribute) else ast.unparse(value)
    return TABLE_NAME.fullmatch(name) is not None


def _endless_caches(path: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        text = ast.unparse(decorator).removeprefix("functools.")
        if text == "cache" or (text.startswith("lru_cache(") and "None" in text):
            yield f"{path}:{function.lineno}: {function.name}: a cache needs a bound"


# ---- who may change what


def unlisted_classes(path: str, source: str, table: list[Listed]) -> Iterator[str]:
    """Find classes that can change after they were made and that the table does not list."""
    listed = {row.name for row in table if row.module == path}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or node.name in listed:
            continue
        if reason := _why_mutable(node):
            yield f"{path}:{node.lineno}: {node.name} {reason}; list it with its one writer"


def _why_mutable(node: ast.ClassDef) -> str | None:
    declared = [ast.unparse(part) for part in (*node.decorator_list, *node.keywords, *node.bases)]
    made = any(text.split("(")[0].split(".")[-1] == "dataclass" for text in declared)
    struct = any(text.split(".")[-1] == "Struct" for text in declared)
    if (made or struct) and not any("frozen=True" in text for text in declared):
        return "is not frozen"
    methods = [
        part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for method in methods:
        name = next(stores_to_self(method), None)
        if name is not None and method.name not in {"__init__", "__post_init__"}:
            return f"changes self.{name} in {method.name}()"
    return None


def stores_to_self(method: ast.AST) -> Iterator[str]:
    """Yield the attributes of self that a method assigns, deletes, or stores an item into."""
    for node in ast.walk(method):
        target = node.value if isinstance(node, ast.Subscript) else node
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if stored and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            yield target.attr


def attributes(source: str, name: str) -> set[str]:
    """Return the names that instances of the class carry: annotated ones and self.name = ..."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for part in node.body:
                if isinstance(part, ast.AnnAssign):
                    found.add(ast.unparse(part.target))
                elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.update(stores_to_self(part))
    return found


def foreign_stores(path: str, source: str, writers: dict[str, set[str]]) -> Iterator[str]:
    """Find assignments to an attribute that a listed class owns, made by another module.

    `writers` maps an attribute to the modules that may assign it: the class's own and its writer.
    An application's `state` is starlette's open namespace, not one of ours.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            allowed = writers.get(node.attr)
            ours = ast.unparse(node.value).split(".")[-1] not in {"self", "cls", "state"}
            if allowed and ours and path not in allowed:
                yield f"{path}:{node.lineno}: {ast.unparse(node)} belongs to {sorted(allowed)}"
