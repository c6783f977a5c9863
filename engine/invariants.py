"""What must hold after every step, asserted: the pool, the lists and each sequence agree.

Owns the checks alone; tests call `check` after each step, the engine never does in service. Reads
everything, changes nothing.
"""

import numpy as np

from engine.plan import Plan
from engine.request import Request
from engine.rows import PLACEHOLDER
from engine.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError for the first law that is broken."""
    waiting = scheduler.roster.waiting.requests()
    running = scheduler.roster.running.rows
    assert len(waiting) == len(scheduler.roster.waiting)
    assert all(request.state == "running" for request in running)
    assert all(request.state in ("waiting", "preempted") for request in waiting)
    assert all(not request.blocks for request in waiting)
    assert len(running) <= scheduler.config.max_num_seqs
    assert scheduler.roster.kv_tokens == sum(request.computed for request in running)
    late = sum(1 for request in scheduler.roster.requests.values() if request.state == "finished")
    assert len(scheduler.roster.requests) == len(running) + len(waiting) + late
    for request in scheduler.roster.requests.values():
        check_request(request)
        check_cells(request, scheduler.pool.block_tokens)
    assert scheduler.roster.table.slots_used == len(scheduler.roster.requests)
    assert scheduler.roster.running.slots.tolist() == [request.slot for request in running]
    plan = Plan(step=0, token_budget=0)
    scheduler.roster.running.copy_to(plan, np.arange(len(running)))
    assert plan.requests == [request.number for request in running]
    assert all(
        mine is request.blocks for mine, request in zip(plan.block_tables, running, strict=True)
    )
    for request in running:
        assert scheduler.pool.blocks_for(request.computed) <= len(request.blocks)
    scheduler.pool.check([request.blocks for request in running])


def check_cells(request: Request, block_tokens: int) -> None:
    """Raise AssertionError where the table tells another story than the sequence's own lists."""
    cells, slot = request.table.cells, request.slot
    assert request.prompt_tokens <= cells["read"][slot] <= request.known, request
    assert request.tokens[: request.prompt_tokens].tolist() == request.submit.prompt, request
    assert cells["prompt"][slot] == request.prompt_tokens, request
    assert cells["room"][slot] == len(request.blocks) * block_tokens, request
    assert cells["decided"][slot] == (request.finish is not None), request
    assert cells["limit"][slot] == (0 if request.finish else request.computed_max), request
    if request.finish is None:
        last = PLACEHOLDER if request.placeholders else request.tokens[-1]
        assert cells["last"][slot] == last, request


def check_request(request: Request) -> None:
    """Raise AssertionError for what cannot be true of one sequence."""
    assert 0 <= request.computed <= request.highest <= request.known, request
    counts = (request.in_flight, request.flights, request.placeholders, request.undelivered)
    assert min(counts) >= 0, request
    assert request.output_tokens <= request.submit.max_tokens, request
    assert (request.finish is None) == (request.life.decided is None), request
    if request.state == "finished":
        assert request.finish is not None, request
        assert not request.blocks, request
        assert not request.in_flight, request
