"""Load generators as they are, against our server: guidellm and aiperf, each in a venv of its own.

`make clients` runs it: both weigh gigabytes, so no test does. Installs what is missing, serves the
model folder it is given, runs each program unmodified and holds its own report against the
server's: every request must have succeeded. An HTTP client of the server, like the programs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.machine import StolenTime, describe
from bench.whole_path import server

REQUESTS = 40
PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 64, 16, 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """A served model: where, under which name, and the folder with its tokenizer."""

    url: str
    name: str
    folder: Path
    out: Path


@dataclass(frozen=True, kw_only=True)
class Program:
    """A load generator: what to install, how to run it, and how its report says what it did."""

    package: str
    command: Callable[[Path, Target], list[str]]
    report: Callable[[Path], dict[str, Any]]


def guidellm_command(venv: Path, target: Target) -> list[str]:
    """Return a run of so many requests over so many streams."""
    return [
        str(venv / "bin" / "guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={target.url},model={target.name}"),
        *("--tokenizer", f"kind=hf_auto,model={target.folder}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={target.out / 'guidellm.json'}"),
        "--disable-progress",
    ]


def guidellm_report(out: Path) -> dict[str, Any]:
    """Return what its own report says of successes, errors and latencies."""
    (benchmark,) = json.loads((out / "guidellm.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    metrics = benchmark["metrics"]

    def median(name: str) -> Any:
        return metrics[name]["successful"]["median"]

    return {
        "succeeded": totals["successful"],
        "failed": totals["errored"],
        "ttft_ms": median("time_to_first_token_ms"),
        "itl_ms": median("inter_token_latency_ms"),
    }


def aiperf_command(venv: Path, target: Target) -> list[str]:
    """Return a streamed chat run of so many requests at so many at once."""
    return [
        str(venv / "bin" / "aiperf"),
        "profile",
        *("-m", target.name, "--tokenizer", str(target.folder), "--url", target.url),
        *("--endpoint-type", "chat", "--streaming", "--ui-type", "none"),
        *("--concurrency", str(STREAMS), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(target.out)),
    ]


def aiperf_report(out: Path) -> dict[str, Any]:
    """Return what its own report says of successes, errors and latencies."""
    found = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    failed = (found.get("error_request_count") or {}).get("avg", 0)
    return {
        "succeeded": int(found["request_count"]["avg"]),
        "failed": int(failed),
        "ttft_ms": found["time_to_first_token"]["p50"],
        "itl_ms": found["inter_token_latency"]["p50"],
    }


PROGRAMS = {
    "guidellm": Program(
        package="guidellm==0.8.1", command=guidellm_command, report=guidellm_report
    ),
    "aiperf": Program(package="aiperf==0.13.0", command=aiperf_command, report=aiperf_report),
}


def installed(name: str, folder: Path) -> Path:
    """Return the program's venv, made and filled if need be; torch is the one we pin ourselves."""
    venv = folder / name
    if not (venv / "bin" / name).exists():
        print(f"== Installing {PROGRAMS[name].package} into {venv} (once; gigabytes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pin = folder / "pins.txt"
        pins = Path("constraints.txt").read_text().splitlines()
        pin.write_text("\n".join(line for line in pins if line.startswith("torch==")) + "\n")
        pip = [str(venv / "bin" / "pip"), "install", "--no-input", "-q", "-c", str(pin)]
        subprocess.run([*pip, PROGRAMS[name].package], check=True)
    return venv


def run(name: str, venv: Path, target: Target) -> dict[str, Any]:
    """Run one program as its users do; return its own report, and what the server counted."""
    before = ended(target.url)
    done = subprocess.run(
        ["env", "TOKENIZERS_PARALLELISM=false", *PROGRAMS[name].command(venv, target)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return PROGRAMS[name].report(target.out) | {"server_ended": ended(target.url) - before}


def ended(url: str) -> int:
    """Return how many sequences the server has finished."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    name = "iterscope_requests_ended_total{"
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))


def main() -> int:
    """Run each program; 0 when every request of each succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PROGRAMS), help="one program; all by default")
    parser.add_argument("--model", required=True, type=Path, help="a Hugging Face folder")
    parser.add_argument("--venvs", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, StolenTime() as stolen:
        folder = Path(name)
        with server(folder, "--model", str(flags.model), "--served-model-name", "m") as (url, _):
            for program in [flags.only] if flags.only else PROGRAMS:
                venv = installed(program, flags.venvs)
                out = folder / program
                out.mkdir()
                target = Target(url=url, name="m", folder=flags.model.resolve(), out=out)
                found[program] = run(program, venv, target)
                print(f"{program:10} {json.dumps(found[program])}", flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(found | describe(stolen), indent=1))
    wrong = [one for one in found.values() if one["failed"] or one["succeeded"] < REQUESTS]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
