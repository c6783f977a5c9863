"""The rules of the house as functions: source text in, findings out, each with file and line.

Owns what test_architecture.py applies to the tree and test_house_rules.py applies to bad samples,
so that every rule is known to be able to fail. Reads no files itself; a path given here is
relative to the repository's root, with forward slashes.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400
LINE_LENGTH_MAX = 100
PACKAGES = ("telemetry", "kernels", "engine", "server", "bench", "grafana")
LEFTOVER = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
HTML_FROM_TEXT = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\s*\(|new Function)\b"
)
REMOTE_CODE = re.compile(
    r"""(?:\b(?:src|href)\s*=\s*|\bfrom\s+|\bimport\s*\(?\s*|\burl\(\s*)["']?(?:https?:)?//"""
)
ELSEWHERE = re.compile(
    r"\.\./sha" + "red|/work/sha" + "red|"
    r"\b(?:py" + r"pi\.org|pythonhosted\.org|np" + r"mjs\.(?:org|com)|debian\.(?:org|net)|"
    r"download\.py" + r"torch\.org|ana" + r"conda\.(?:org|com)|crates\.io)"
)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `target` is the deepest dotted name that may be a module."""

    line: int
    module: str
    target: str
    in_function: bool


def imports(path: str, source: str) -> Iterator[Import]:
    """Yield every import, those inside functions and import_module("...") included."""
    for node, in_function in walk_functions(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, alias.name, in_function)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parents = path.split("/")[: -node.level]
                module = ".".join([*parents, *([module] if module else [])])
            for alias in node.names:
                yield Import(node.lineno, module, f"{module}.{alias.name}", in_function)
        elif isinstance(node, ast.Call) and call_name(node) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(node.lineno, first.value, first.value, in_function)


def walk_functions(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below `node` and whether a function's body holds it."""
    for child in ast.iter_child_nodes(node):
        yield child, inside
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk_functions(child, inside or function)


def call_name(call: ast.Call) -> str:
    """Return the last part of what is called: `deque` for collections.deque(...)."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# ---- sizes and texts


def too_long(path: str, source: str) -> Iterator[str]:
    """Find files and lines over their limit."""
    lines = source.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"{path}:{len(lines)}: {len(lines)} lines, at most {FILE_LINES_MAX} are allowed"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH_MAX:
            yield f"{path}:{number}: line of {len(line)} characters"


def long_functions(path: str, source: str) -> Iterator[str]:
    """Find Python functions over their limit, def line and docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def missing_opening(path: str, source: str) -> Iterator[str]:
    """Find a Python module whose docstring is absent or not of 3 to 8 lines of text."""
    text = ast.get_docstring(ast.parse(source)) or ""
    yield from _opening_of(path, 3, [line for line in text.splitlines() if line.strip()])


def missing_opening_javascript(path: str, source: str) -> Iterator[str]:
    """Find a JavaScript module that does not open with a comment of 2 to 8 lines."""
    found = re.match(r"\s*(/\*.*?\*/|(?:[ \t]*//[^\n]*\n)+)", source, re.DOTALL)
    text = found.group(1) if found else ""
    lines = [line.strip(" \t/*") for line in text.splitlines()]
    yield from _opening_of(path, 2, [line for line in lines if line])


def _opening_of(path: str, least: int, lines: list[str]) -> Iterator[str]:
    if not least <= len(lines) <= 8:
        yield f"{path}:1: {len(lines)} lines on what it owns and who calls it, not {least} to 8"


def matches(path: str, source: str, pattern: re.Pattern[str], problem: str) -> Iterator[str]:
    """Find lines that hold what `pattern` forbids."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := pattern.search(line):
            yield f"{path}:{number}: {problem}: {found.group(0).strip()}"


def blank_javascript(source: str) -> str:
    """Return the source with comments, strings and regular expressions blanked, lines kept."""
    literal = re.compile(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"
        r"|(?<=[=(,:!&|?{};\[>])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/",
        re.DOTALL,
    )
    return literal.sub(lambda found: re.sub(r"[^\n]", " ", found.group(0)), source)


def long_functions_javascript(path: str, source: str) -> Iterator[str]:
    """Find JavaScript functions over their limit: braces after `=>` or a parameter list."""
    text = blank_javascript(source)
    opened: list[int] = []
    for position, character in enumerate(text):
        if character == "{":
            opened.append(position)
        elif character == "}" and opened:
            start = opened.pop()
            length = text.count("\n", start, position) + 1
            if length > FUNCTION_LINES_MAX and _opens_function(text[:start].rstrip()):
                line = text.count("\n", 0, start) + 1
                yield f"{path}:{line}: a function has {length} lines"


def _opens_function(before: str) -> bool:
    if before.endswith("=>"):
        return True
    depth = 0
    for position in range(len(before) - 1 if before.endswith(")") else -1, -1, -1):
        depth += {")": 1, "(": -1}.get(before[position], 0)
        if depth == 0:
            word = re.search(r"[\w$]*$", before[:position].rstrip())
            return word is None or word.group(0) not in {"if", "for", "while", "switch", "catch"}
    return False


# ---- who may import whom


def against_the_law(path: str, source: str) -> Iterator[str]:
    """Find imports that the import law (ARCHITECTURE.md) forbids to the package of `path`."""
    package = path.split("/", maxsplit=1)[0]
    never = {
        "engine": {"starlette", "sse_starlette", "uvicorn", "duckdb", "prometheus_client"},
        "telemetry": {"torch"},
        "server": {"torch"},
    }.get(package, set())
    for found in imports(path, source):
        top = found.module.split(".", maxsplit=1)[0]
        if path == "telemetry/records.py" and top not in sys.stdlib_module_names:
            yield f"{path}:{found.line}: the contract imports {top}; only the standard library"
        elif top in never or (top in {*PACKAGES, "tests"} and not _may(package, found)):
            yield f"{path}:{found.line}: {package}/ must not import {found.target}"
        elif package == "server" and top == "bench" and not _on_use(path, found):
            yield f"{path}:{found.line}: only server/cli.py imports bench/, inside a function"


def _may(package: str, found: Import) -> bool:
    top = found.module.split(".", maxsplit=1)[0]
    if package == "engine" and top == "telemetry":
        return "telemetry.records" in (found.module, found.target)
    return top in {
        "telemetry": {"telemetry"},
        "kernels": {"kernels"},
        "engine": {"engine", "kernels"},
        "server": {"server", "engine", "telemetry", "bench"},
        "bench": {"bench", "engine", "kernels", "telemetry"},
        "grafana": {"grafana", "telemetry"},
    }.get(package, set())


def _on_use(path: str, found: Import) -> bool:
    return path == "server/cli.py" and found.in_function


def against_reading_order(path: str, source: str, order: dict[str, list[str]]) -> Iterator[str]:
    """Find imports of a module that stands at or below the importer in its package's order."""
    package, _, rest = path.removesuffix(".py").partition("/")
    listed = order.get(package, [])
    name = rest.replace("/", ".")
    if name not in listed:
        yield f"{path}:1: {name} is not in the reading order of {package} (ARCHITECTURE.md)"
        return
    for found in imports(path, source):
        for full in (found.target, found.module):
            other = full.removeprefix(f"{package}.")
            if full.startswith(f"{package}.") and other in listed:
                if listed.index(other) >= listed.index(name):
                    yield f"{path}:{found.line}: imports {full}, which is read after {name}"
                break


def against_names(path: str, source: str, forbidden: set[str], problem: str) -> Iterator[str]:
    """Find imports of any of the forbidden dotted names, or of what lies below one."""
    for found in imports(path, source):
        for name in (found.module, found.target):
            if any(name == bad or name.startswith(f"{bad}.") for bad in forbidden):
                yield f"{path}:{found.line}: {problem}: {name}"
                break


def environment_reads(path: str, source: str) -> Iterator[str]:
    """Find uses of the process's environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(source)):
        used: set[str] = set()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
            used = {node.attr} & names
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {alias.name for alias in node.names} & names
        if used:
            line = getattr(node, "lineno", 1)
            yield f"{path}:{line}: {min(used)}: the environment is server/config.py's"
