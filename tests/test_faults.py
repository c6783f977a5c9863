"""What an exception in a step costs: one request if it can, the step's else, never the service.

GIVEN sequences under way, WHEN a step fails, memory runs out, or a row is no number, THEN exactly
those end who must, the others go on with the same tokens, every law holds, and blocks are back.
The core runs over the fake runner; servers, memory limits and the poisoned model are real.
"""

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core import DeviceLost
from engine.faults import kind_of, line_of
from engine.plan import Plan
from engine.scheduler import TIGHT_STEPS
from tests import tiny
from tests.api import ids, post, still_answers
from tests.servers import Server, engine_pid, serving
from tests.simulation import Simulation
from tests.test_scheduler import assert_laws, assert_tiles

OUT_OF_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
)


POISON = 300


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (OUT_OF_MEMORY, "memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "device"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (ValueError("CUDA error"), "step"),
        (RuntimeError("shape mismatch"), "step"),
        (AssertionError(), "step"),
    ],
)
def test_an_exception_is_read(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert "\n" not in line_of(error)


def failing(simulation: Simulation, error: Exception, steps: set[int]) -> None:
    """Let these steps raise when they are run."""
    simulation.runner.fails = lambda plan: error if plan.step in steps else None


def crowd(depth: int, **settings: object) -> Simulation:
    simulation = Simulation(depth=depth, kv_blocks=24, **settings)
    for name in "abcd":
        simulation.add(name, 20, 12)
    return simulation


def whole(simulation: Simulation) -> None:
    """Run to the end; everything is back and on record once."""
    simulation.drain()
    assert simulation.scheduler.pool.used == 0
    assert simulation.runner.kept == 0
    assert_laws(simulation)
    assert_tiles(simulation)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_memory_that_runs_out_once_costs_nobody(
    depth: int, batching: str, chunked: bool, step: int
) -> None:
    """The step's work is planned again, in steps half as large, for a while."""
    settings = {"batching": batching, "enable_chunked_prefill": chunked}
    healthy, simulation = crowd(depth, **settings), crowd(depth, **settings)
    whole(healthy)
    failing(
        simulation, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), {step}
    )
    whole(simulation)
    assert simulation.outputs() == healthy.outputs()
    assert {end.finish for end in simulation.emitted.ends} == {"length"}
    (fault,) = simulation.emitted.faults
    assert (fault.step, fault.where) == (step, "engine step")
    records = {record.step: record for record in simulation.emitted.iterations}
    failed = sum(records[step].token_counts)
    retried = records[step + 1]
    assert sum(retried.token_counts) <= (max(1, failed // 2) if chunked else failed)
    dropped = sum(end.dropped_tokens for end in simulation.emitted.ends)
    assert dropped == failed, "what was computed in vain is on record"


def test_the_budget_is_whole_again_after_a_while() -> None:
    simulation = Simulation(max_num_batched_tokens=16, max_num_seqs=1, kv_blocks=24)
    simulation.add("a", 20, TIGHT_STEPS + 4)
    failing(simulation, MemoryError(), {1})
    whole(simulation)
    budgets = [record.token_budget for record in simulation.emitted.iterations]
    assert budgets == [16] + [8] * TIGHT_STEPS + [16] * (len(budgets) - TIGHT_STEPS - 1)
    assert budgets[-1] == 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_memory_that_runs_out_again_costs_the_newest_alone(
    depth: int, caching: bool, step: int
) -> None:
    healthy = crowd(depth, enable_prefix_caching=caching)
    whole(healthy)
    simulation = crowd(depth, enable_prefix_caching=caching)
    failing(simulation, OUT_OF_MEMORY, {step, step + 1})
    whole(simulation)
    finishes = {simulation.names[end.request]: end.finish for end in simulation.emitted.ends}
    lost = [name for name, finish in finishes.items() if finish == "error"]
    assert len(lost) == 1
    assert lost[0] == max(rows_of(simulation, step + 1))
    first, second = simulation.emitted.faults
    assert "can't allocate memory" in first.error
    assert [(fault.step, fault.where) for fault in (first, second)] == [
        (step, "engine step"),
        (step + 1, "engine step"),
    ]
    for name in set("abcd") - set(lost):
        assert simulation.outputs()[name] == healthy.outputs()[name]


def rows_of(simulation: Simulation, step: int) -> list[str]:
    (record,) = (one for one in simulation.emitted.iterations if one.step == step)
    return [simulation.names[request] for request in record.requests]


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_that_never_suffices_ends_all_and_stops(depth: int) -> None:
    simulation = crowd(depth)
    failing(simulation, MemoryError(), set(range(1, 100)))
    whole(simulation)
    assert {end.finish for end in simulation.emitted.ends} == {"error"}
    assert len(simulation.emitted.faults) == 1 + 4, "each failed step after the first ends one"


@pytest.mark.parametrize("depth", [1, 2])
def test_another_error_ends_the_steps_requests_alone(depth: int) -> None:
    simulation = crowd(depth, max_num_seqs=2)
    failing(simulation, ValueError("planted"), {4})
    whole(simulation)
    lost = {simulation.names[end.request] for end in simulation.emitted.ends if end.error}
    assert lost == set(rows_of(simulation, 4))
    assert lost == {"a", "b"}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fixed_batch_loses_one_row_too(depth: int) -> None:
    healthy = crowd(depth, batching="static")
    whole(healthy)
    simulation = crowd(depth, batching="static")
    failing(simulation, MemoryError(), {3, 4})
    whole(simulation)
    lost = [simulation.names[end.request] for end in simulation.emitted.ends if end.error]
    assert lost == [max(rows_of(simulation, 4))]
    for name in set("abcd") - set(lost):
        assert simulation.outputs()[name] == healthy.outputs()[name]


def test_a_lost_device_ends_the_engine_after_everybody_was_told() -> None:
    simulation = crowd(1)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    failing(simulation, error, {3})
    simulation.step(2)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        simulation.step()
    told = {delta.request for delta in simulation.emitted.deltas if delta.finish == "error"}
    assert told == set(simulation.emitted.iterations[-1].requests)
    assert len(simulation.emitted.faults) == 1


def test_nothing_is_launched_upon_a_step_that_failed() -> None:
    """At depth 2 the next plan would read tokens that never came."""
    simulation = crowd(2)
    seen: list[int] = []

    def fails(plan: Plan) -> Exception | None:
        seen.append(plan.step)
        return MemoryError() if plan.step == 3 else None

    simulation.runner.fails = fails
    simulation.step(2)
    assert seen == [1, 2, 3]
    whole(simulation)


# ---- real engines


def poisoned(folder: Path) -> Path:
    """Write a tiny model in which token POISON makes its own row not finite, and only its own.

    One dimension of the embedding is its alone; queries and keys blow it up beyond f32.
    """
    from safetensors.numpy import load_file, save_file

    tiny.write(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[POISON] = 0
    embedding[POISON, 0] = 1
    for part in ("q_proj", "k_proj"):
        weights[f"model.layers.0.self_attn.{part}.weight"][:, 0] = np.float32(1e25)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    model = poisoned(folder / "poisoned")
    with serving(folder, model, "--history", str(folder / "history")) as running:
        yield running


def body(prompt: list[int], tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


def test_a_poisoned_prompt_ends_alone(server: Server) -> None:
    healthy = body(ids(30)[5:], 200)
    alone = post(server, "/v1/completions", healthy)
    assert alone.status_code == 200
    with ThreadPoolExecutor(6) as pool:
        beside = [pool.submit(post, server, "/v1/completions", healthy) for _ in range(3)]
        bad = [
            pool.submit(post, server, "/v1/completions", body([9, POISON, number], 20))
            for number in (9, 10, 11)
        ]
        refused = [one.result() for one in bad]
        texts = {one.result().json()["choices"][0]["text"] for one in beside}
    assert texts == {alone.json()["choices"][0]["text"]}
    assert {answer.status_code for answer in refused} == {500}
    for answer in refused:
        assert "not finite" in answer.json()["error"]["message"]
    still_answers(server)
    server.wait_idle()
    assert server.get("/health").status_code == 200


def test_memory_that_runs_out_for_real_costs_no_engine(server: Server) -> None:
    still_answers(server)
    pid, faults = engine_pid(server), server.metric("iterscope_faults_total")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * 4096, limits[1]))
    try:
        with ThreadPoolExecutor(8) as pool:
            prompts = [body([9 + number, *ids(1900)[5:]], 4) for number in range(8)]
            answers = list(pool.map(lambda one: post(server, "/v1/completions", one), prompts))
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, limits)
    ended = [answer for answer in answers if answer.status_code != 200]
    server.wait(lambda: server.metric("iterscope_faults_total") > faults)  # the limit was felt
    for answer in ended:
        assert answer.status_code == 500
        assert "memory ran out" in answer.json()["error"]["message"]
    still_answers(server)
    assert engine_pid(server) == pid, "the engine was lost"
    server.wait_idle()
