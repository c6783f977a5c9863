"""A model folder's tokenizer built once in a process of its own, before the server builds it.

Owns that process and what is made of its end; served_model.py runs one at each start. The library
is native code that can panic or abort over a file that nobody vouches for, and no `except` holds
that. Must say nothing of ordinary faults: the server's own attempt words those.
"""

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys

from engine.spec import SpecError, read_tokenizer_metadata
from server.tokenizer import build_tokenizer

PATIENCE_S = 60.0
SAMPLE = "Hello, wörld 123\n"


def try_tokenizer(path: str) -> None:
    """Raise SpecError if building or using the tokenizer of the model at `path` ends a process."""
    command = [sys.executable, "-P", "-m", "server.tokenizer_trial", path]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpecError(f"{path}: its tokenizer takes over {PATIENCE_S:g} s to build") from None
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
        raise SpecError(f"{path}: its tokenizer.json ends the program that reads it ({how})")
    if done.returncode > 0:
        raise SpecError(f"{path}: its tokenizer.json breaks the library that reads it")


def main() -> None:
    """Be the trial."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(SpecError):
        tokenizer = build_tokenizer(read_tokenizer_metadata(sys.argv[1]))
        asyncio.run(tokenizer.encode(SAMPLE, add_special=True))
        tokenizer.close()


if __name__ == "__main__":
    main()
