"""A GPU that compiles and never runs: Triton's own launches, with everything but the last step.

Owns the stand-in for Triton's driver. Tests run the product's launches on it, so that what is
compiled and looked at is what a device of that kind would get, integers, strides and alignments
included. Needs no GPU and no CUDA.
"""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
REGISTERS_MAX = 255
SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one block may have, of each compute capability."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as the compiler left it."""

    name: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


@dataclass
class DryDevice:
    """Triton's driver for a compute capability; `compiled` fills as kernels are launched."""

    capability: int
    compiled: list[Compiled] = field(default_factory=list)
    number: int = field(default_factory=time.monotonic_ns)
    """Triton keeps what it has compiled by this: each device begins anew."""

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def utils(self) -> "DryDevice":
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES_MAX[self.capability]}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return "module", "function", 0, 0, 1024

    def unload_module(self, module: str) -> None:
        pass

    def keep(self, kernel: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [str(DISASSEMBLER), "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", told)
        assert found, told
        self.compiled.append(
            Compiled(
                name=kernel.name,
                shared_bytes=kernel.metadata.shared,
                registers=int(found.group(1)),
                stack_bytes=int(found.group(2)),
                ptx=kernel.asm["ptx"],
            )
        )


@contextmanager
def dry_device(capability: int, folder: Path) -> Iterator[DryDevice]:
    """Make launches go to a device of this kind, for as long as the block runs.

    What is compiled is kept in a folder, so that no earlier run's work is taken for this one's.
    """
    device = DryDevice(capability)
    knobs = triton.knobs
    before = (knobs.runtime.jit_post_compile_hook, knobs.cache.dir)

    def compiled(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        device.keep(fn.jit_function.device_caches[device.number][0][compile["key"]])

    driver.set_active(device)
    knobs.runtime.jit_post_compile_hook, knobs.cache.dir = compiled, str(folder)
    try:
        yield device
    finally:
        driver.set_active(None)
        knobs.runtime.jit_post_compile_hook, knobs.cache.dir = before
