"""Planted and random mutants of the scheduler: each must turn a test red.

`python -m tests.mutants planted` plants the faults that servers of this kind really had, one at a
time, in a copy of the tree; `python -m tests.mutants random --seed 1 --count 20` lets a small
mutation tool choose. Prints who was caught by what, and fails when too many survive.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in ("rows", "timelines", "running", "waiting", "scheduler", "policies", "oracle")
)
TARGETS = (
    *("scheduler", "roster", "admission", "draft", "kv", "waiting", "batching", "policies"),
    *("table", "rows", "running"),
)
SURVIVORS_MAX_SHARE = 0.1
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    name: str
    file: str
    old: str
    new: str


PLANTED = (
    Mutant(
        "no watermark waiver",
        "engine/admission.py",
        "keep = self._watermark if view.running else 0",
        "keep = self._watermark",
    ),
    Mutant(
        "double free",
        "engine/roster.py",
        "self._pool.release(request.let_go())",
        "self._pool.release(request.blocks); self._pool.release(request.let_go())",
    ),
    Mutant(
        "wrong victim",
        "engine/policies.py",
        "return max(unplaced, key=by_arrival)",
        "return min(unplaced, key=by_arrival)",
    ),
    Mutant("reasons swapped", "engine/admission.py", 'return "seqs"', 'return "budget"'),
    Mutant(
        "a starved tenant",
        "engine/policies.py",
        "self._ranks = self._counters[self._places_of_lines]",
        "self._ranks = -self._counters[self._places_of_lines]",
    ),
    Mutant(
        "budget off by one",
        "engine/scheduler.py",
        "self._budget = config.max_num_batched_tokens",
        "self._budget = config.max_num_batched_tokens + 1",
    ),
    Mutant(
        "a block stays behind",
        "engine/roster.py",
        "self._pool.release(request.let_go())",
        "self._pool.release(request.let_go()[:-1])",
    ),
    Mutant(
        "a block is found before it was written",
        "engine/roster.py",
        "full, named = request.computed // self._pool.block_tokens,",
        "full, named = request.prompt_tokens // self._pool.block_tokens,",
    ),
    Mutant(
        "a full hit leaves nothing to compute",
        "engine/admission.py",
        "min(request.known - 1, request.read)",
        "min(request.known, request.read)",
    ),
    Mutant(
        "late rows count as computed",
        "kernels/cpu/rows.cpp",
        "row[EPOCH] == reserved[EPOCHS * n + i] && row[PLANNED] > row[COMPUTED]",
        "row[COMPUTED] >= 0",
    ),
)


def copy_tree(folder: Path) -> Path:
    """Copy what the scheduler's tests need."""
    for name in ("engine", "kernels", "telemetry", "tests", "bench"):
        ignore = shutil.ignore_patterns("__pycache__", "*.csv")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def is_caught(folder: Path) -> str | None:
    """Return the first failing test, None when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end within 180 s"
    if done.returncode == 0:
        return None
    # What pytest did not run has caught nothing: 1 is a failed test, 2 a module that fails to load.
    assert done.returncode in (1, 2), done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit {done.returncode}"


def planted() -> list[tuple[str, str | None]]:
    """Try every planted mutant."""
    found = []
    for mutant in PLANTED:
        with tempfile.TemporaryDirectory() as name:
            folder = copy_tree(Path(name))
            file = folder / mutant.file
            source = file.read_text()
            assert mutant.old in source, f"{mutant.name}: {mutant.file} has changed"
            file.write_text(source.replace(mutant.old, mutant.new))
            found.append((mutant.name, is_caught(folder)))
            print(f"{mutant.name:45} {found[-1][1] or 'SURVIVED'}", flush=True)
    return found


def sites(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes whose operator can be swapped, asserts left out."""
    inside_asserts = {
        child for node in ast.walk(tree) if isinstance(node, ast.Assert) for child in ast.walk(node)
    }
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if node in inside_asserts:
            continue
        operator = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
        if type(operator) in SWAPS:
            found.append(node)
    return found


def mutate(source: str, pick: random.Random) -> tuple[str, str]:
    """Return the source with one operator swapped, and where."""
    tree = ast.parse(source)
    node = pick.choice(sites(tree))
    line = source.splitlines()[node.lineno - 1].strip()  # type: ignore[attr-defined]
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    else:
        node.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
    return ast.unparse(tree), f"{node.lineno}: {line}"  # type: ignore[attr-defined]


def by_tool(seed: int, count: int) -> list[tuple[str, str | None]]:
    """Let the tool make `count` mutants of the target modules."""
    pick = random.Random(seed)
    found = []
    for _ in range(count):
        target = f"engine/{pick.choice(TARGETS)}.py"
        with tempfile.TemporaryDirectory() as name:
            folder = copy_tree(Path(name))
            changed, where = mutate((folder / target).read_text(), pick)
            (folder / target).write_text(changed)
            found.append((f"{target}:{where}", is_caught(folder)))
            print(f"{found[-1][0][:90]:92} {found[-1][1] or 'SURVIVED'}", flush=True)
    return found


def main() -> int:
    """Run one kind; 1 when a planted mutant or more than a tenth of the random ones survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("planted", "random"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    flags = parser.parse_args()
    found = planted() if flags.kind == "planted" else by_tool(flags.seed, flags.count)
    survivors = sum(1 for _, caught in found if caught is None)
    print(f"{len(found) - survivors} of {len(found)} caught")
    allowed = 0 if flags.kind == "planted" else SURVIVORS_MAX_SHARE * len(found)
    return int(survivors > allowed)


if __name__ == "__main__":
    sys.exit(main())
