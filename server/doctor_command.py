"""`iterscope doctor`: what this machine has, what `auto` would choose, and what is wrong with it.

Owns the flags, the check of disk and history, the table for people and the exit code; the device is
asked by engine/diagnosis.py. Works without a server and beside one. Must never fetch a model, start
an engine or write anywhere but to the standard output.
"""

import argparse
import os
import platform
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from engine.config import DTYPES, ConfigError, EngineConfig
from engine.rope import Rope
from engine.spec import ModelSpec, SpecError, read_spec
from server.config import default_history
from server.demo import demo_model_path
from server.terminal import ANSWERED, WRONG, open_console, printable
from telemetry.notes import read_server_file

PACKAGES = ("iterscope", "torch", "triton", "flash-attn", "duckdb", "tokenizers", "gguf", "uvicorn")
DISK_BYTES_MIN = 2**30
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
STAND_IN = ModelSpec(
    path="",
    architecture="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab_size=49152,
    rope=Rope(base=1e5),
    norm_eps=1e-5,
    tied_head=True,
    model_len=8192,
    bos_id=None,
    eos_ids=(0,),
    parameters=134_515_008,
)
"""The demo model's shape, for what `auto` would choose while no model is there."""


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope doctor`."""
    parser.add_argument("--model", help="a model to choose for (default: the demo model)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument(
        "--history", metavar="DIR", help=f"folder of the history (default: {default_history()})"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run_doctor_command(args: argparse.Namespace) -> int:
    """Print the report; 0 when nothing is wrong, 1 otherwise. Misuse raises ConfigError."""
    wrong: list[str] = []
    path = args.model or str(demo_model_path())
    config = EngineConfig(model=path, device=args.device, dtype=args.dtype)
    folder = Path(args.history).expanduser() if args.history else default_history()
    report: dict[str, Any] = {"versions": _versions(), "system": platform.platform()}
    report |= _engine(config, _spec(path, asked=bool(args.model), wrong=wrong), wrong)
    if "device" in report and args.device != "cpu":
        wrong += gpu_troubles(report["device"], driver=NVIDIA_DRIVER.exists())
    report |= {"history": _history(folder, wrong), "wrong": wrong}
    if args.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report)
    return WRONG if wrong else ANSWERED


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _spec(path: str, *, asked: bool, wrong: list[str]) -> ModelSpec:
    """Return the model's spec, or a stand-in; a model asked for by name must be readable."""
    if not asked and not Path(path).exists():
        return STAND_IN
    try:
        return read_spec(path)
    except SpecError as error:
        wrong.append(str(error))
        return STAND_IN


def _engine(config: EngineConfig, spec: ModelSpec, wrong: list[str]) -> dict[str, Any]:
    """Return device, kernels and choice; torch is loaded here, as nowhere else in server/."""
    from engine.diagnosis import (  # noqa: PLC0415
        chosen,
        device_report,
        kernels_report,
        products_report,
    )

    try:
        report = {"device": device_report(config), **kernels_report(config, spec)}
        report |= products_report(config, spec)
        return report | {"model": spec.path or None, "auto": chosen(config, spec)}
    except ConfigError as error:
        wrong.append(str(error))
        return {}


def gpu_troubles(device: dict[str, Any], *, driver: bool) -> list[str]:
    """Return what keeps a GPU that is here from serving, or Triton's kernels from being built."""
    if device["device"] != "cuda":
        build = f"for CUDA {device['cuda']}" if device["cuda"] else "without CUDA"
        told = f"an NVIDIA driver is here, but PyTorch, a build {build}, finds no device of it"
        return [told] if driver else []
    found = []
    if not (shutil.which("gcc") or shutil.which("clang")):
        found.append("no gcc, no clang: Triton, which serves on a GPU, builds a part of itself")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        found.append("no Python.h (python3-dev), which Triton builds a part of itself with")
    return found


def _history(folder: Path, wrong: list[str]) -> dict[str, Any]:
    """Return the state of a history's folder and of the disk below it."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    server = read_server_file(folder)
    if not writable:
        wrong.append(f"{there} cannot be written: no history would be kept")
    if free < DISK_BYTES_MIN:
        wrong.append(f"{there}: {free / 2**20:.0f} MiB are free: the history would soon stop")
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": writable,
        "bytes": sum(file.stat().st_size for file in files),
        "disk_free_bytes": free,
        "server": server.url if server else None,
    }


def _show(report: dict[str, Any]) -> None:
    console, lines = open_console(), _lines(report)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        told = Text.assemble((name.ljust(width), "dim"), " ", printable(value))
        console.print(told, soft_wrap=True)
    for line in report["wrong"]:
        console.print(Text(f"wrong: {printable(line)}", style="bold red"))
    if not report["wrong"]:
        console.print(Text("nothing is wrong", style="green"))


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what people read, one fact a line."""
    lines = [(name, value or "absent") for name, value in report["versions"].items()]
    lines.append(("system", report["system"]))
    if device := report.get("device"):
        rate = device["copy_bytes_per_s"] / 1e9
        name = device.get("name") or device["processor"]
        lines.append(("device", f"{device['device']}: {name}, {device['threads']} threads"))
        lines.append(("memory", f"{device['memory_bytes'] / 2**30:.1f} GiB"))
        lines.append(("copy", f"{rate:.1f} GB/s read and written"))
    for kind in ("attention_backends", "ops"):
        for name, reason in report.get(kind, {}).items():
            lines.append((f"{kind.replace('_', ' ')}: {name}", reason or "would serve"))
    if rows := report.get("products_rows"):
        counts = ", ".join(map(str, rows[:-1]))
        lines.append(("products", f"GFLOP/s of each ops at {counts} and {rows[-1]} rows"))
        if not report["products_steady"]:
            lines.append(("", "measured beside other work: ask again on a quiet machine"))
    for dtype, rates in report.get("products_gflop_s", {}).items():
        for shape, found in rates.items():
            told = (f"{name} {' '.join(f'{rate:.0f}' for rate in found[name])}" for name in found)
            lines.append((f"products: {dtype} {shape}", ", ".join(told)))
    if auto := report.get("auto"):
        names = (
            "device",
            "dtype",
            "kv_cache_dtype",
            "attention_backend",
            "max_model_len",
            "kv_blocks",
        )
        more = ("max_num_seqs", "max_num_batched_tokens", "engine_threads")
        lines.append(("auto chooses", ", ".join(f"{name} {auto[name]}" for name in names + more)))
        lines.append(("for the model", report["model"] or "none is here: the demo model's shape"))
    history = report["history"]
    lines.append(("history", f"{history['folder']}, {history['bytes'] / 2**20:.1f} MiB"))
    lines.append(("held by", history["server"] or "nobody"))
    lines.append(("disk free", f"{history['disk_free_bytes'] / 2**30:.1f} GiB"))
    return lines
