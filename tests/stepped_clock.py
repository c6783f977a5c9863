"""A wall clock that can be stepped, for one process and its children: a shim of libc, built by cc.

Owns the shim and its offset, which lies in a file that the shim maps: CLOCK_REALTIME moves, all
other clocks stay as they are. Without a C compiler there is none, and who asks is told.
"""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile long long *offset_s;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("STEPPED_CLOCK"), O_RDONLY);
    void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) offset_s = found;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (which == CLOCK_REALTIME && offset_s) now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (told) *told = precise.tv_sec;
    return precise.tv_sec;
}
"""


class SteppedClock:
    """The clock of whoever is started with `env`, which is empty where nothing can be built."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock-offset"
        self.step(0)
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(SOURCE)
        compiler = shutil.which("cc")
        self.env: dict[str, str] = {}
        if compiler is not None:
            options = ["-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
            subprocess.run([compiler, *options], check=True)
            self.env = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Move the wall clock to so many seconds beside the true one."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("q", seconds))
