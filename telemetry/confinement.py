"""What the kernel lets the process of a query do: read the files it was given, and compute.

Owns the limits that hold whatever SQL, or a fault in the database library, tries: memory, files,
network, signals, priority, life. Called once, by query_child.py, before anything is opened. Must
import nothing of ours and must never loosen what it has set.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MEMORY_BYTES_MAX = 1536 * 2**20
"""Address space: what is asked beyond it is refused at once, whatever the database would allow."""

FILES_MAX = 4096
FILLING_NICE, ASKED_NICE = 5, 10
"""Added to the server's own, one after the other: queries take what tokens leave over, but a child
that is being made must be ready before the next is needed."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38

# Landlock's system calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_RIGHTS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock to how many rights over files it knows."""
_NETWORK_SINCE, _BIND_AND_CONNECT = 4, 3
_SCOPES_SINCE, _SOCKETS_AND_SIGNALS = 6, 3


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def confine(readable: Sequence[Path], parent: int) -> int:
    """Limit this process for good: it can open nothing but `readable` files and folders.

    Returns the version of Landlock in force, 0 where the kernel has none: then the database's own
    refusal to open files stands alone. The process ends when `parent`, its maker, has ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the server is gone")
    os.nice(FILLING_NICE)
    with suppress(OSError):  # let the kernel, when memory ends, take this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        _, most = resource.getrlimit(limit)
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (allowed, allowed))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _landlock(libc, readable)


def step_back() -> None:
    """Take the place behind everything else, from the first query on."""
    os.nice(ASKED_NICE)


def _landlock(libc: ctypes.CDLL, readable: Sequence[Path]) -> int:
    version: int = libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    if version < 1:
        return 0
    rights = (1 << _RIGHTS_BITS[min(version, max(_RIGHTS_BITS))]) - 1
    ruleset = _Ruleset(files=rights)
    size = 8
    if version >= _NETWORK_SINCE:
        ruleset.network, size = _BIND_AND_CONNECT, 16
    if version >= _SCOPES_SINCE:
        ruleset.scopes, size = _SOCKETS_AND_SIGNALS, 24
    rules = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    if rules < 0:
        return 0
    try:
        for path in readable:
            _allow_reading(libc, rules, path)
        done = libc.syscall(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
    return version if done == 0 else 0


def _allow_reading(libc: ctypes.CDLL, rules: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there cannot be read; the database says so in its own words
    try:
        reading = _READ_FILE | _READ_FOLDER if path.is_dir() else _READ_FILE
        rule = _PathRule(allowed=reading, parent=descriptor)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)
