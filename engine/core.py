"""The core: one iteration as plan, run, commit, emit, and the record that makes it visible.

Owns the step's timing and builds the Iteration, RequestStart and RequestEnd records; engine/loop.py
calls add, abort and step. Runner, Clock and Emit are handed in, the three seams that tests may
fake. Imports no torch, so that scheduling can be simulated and tested in milliseconds.
"""

import traceback
from dataclasses import dataclass
from typing import Protocol

from engine.messages import Abort, Delta, Submit
from engine.plan import Clock, Plan, Runner, StepOutput
from engine.request import Request, end_record, start_record
from engine.scheduler import Scheduler
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart


class Emit(Protocol):
    """Where the core's news go. Nothing here may wait for anyone.

    lost: iterations dropped since the last one that was taken.
    """

    lost: int

    def start(self, record: RequestStart) -> None:
        """A sequence entered the queue."""
        ...

    def step(self, deltas: list[Delta], iteration: Iteration, ends: list[RequestEnd]) -> None:
        """A step was committed: what clients gain, its record, and who ended."""
        ...

    def fault(self, record: Fault) -> None:
        """A step failed; the service goes on."""
        ...


@dataclass(slots=True)
class Times:
    """Instants of one step, in ns: its parts sum to its tile exactly."""

    begin: int
    planned_from: int
    planned: int
    launched: int
    waited: int
    end: int


class Core:
    """Drives a scheduler and a runner; `has_work` says whether a step would do anything."""

    def __init__(self, *, scheduler: Scheduler, runner: Runner, clock: Clock, emit: Emit) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._emit = emit
        self._tile_from = clock.now_ns()
        self._emit_ns = 0
        self._aborted = False

    @property
    def has_work(self) -> bool:
        """Whether sequences run or wait, or aborts are still to be recorded."""
        scheduler = self.scheduler
        return bool(scheduler.running) or len(scheduler.waiting) > 0 or self._aborted

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return self.scheduler.steps

    def wake(self) -> None:
        """Note that the engine slept until now: the sleep belongs to no iteration."""
        self._tile_from = self._clock.now_ns()

    def add(self, submit: Submit) -> None:
        """Accept a sequence into the queue, on record."""
        request = self.scheduler.add(submit, self._clock.now_ns())
        self._emit.start(start_record(request))
        self._aborted |= request.state == "finished"

    def abort(self, abort: Abort) -> None:
        """End a sequence early; unknown or ended ones are left as they are."""
        self._aborted |= self.scheduler.abort(abort, self._clock.now_ns())

    def step(self) -> None:
        """Plan, run, commit, emit."""
        now = self._clock.now_ns
        planned_from = now()
        plan = self.scheduler.plan(planned_from)
        planned = launched = waited = now()
        output = StepOutput(tokens=[], device_ns=0)
        fault: Fault | None = None
        if plan.requests:
            try:
                pending = self._runner.run(plan)
                launched = now()
                output = pending.wait()
            except Exception as error:  # noqa: BLE001  the engine ends requests, it never raises
                fault = _step_fault(plan.step, error, now())
            waited = now()
        if fault:
            self.scheduler.roll_back(plan, fault.error, waited)
            self._emit.fault(fault)
        else:
            self.scheduler.commit(plan, output, waited)
        self._aborted = False
        ended = self.scheduler.take_ended()
        times = Times(self._tile_from, planned_from, planned, launched, waited, now())
        self._tile_from = times.end
        self._report(plan, output, times, ended)

    def _report(self, plan: Plan, output: StepOutput, times: Times, ended: list[Request]) -> None:
        """Build the step's records and emit them; the time this takes is the next one's emit_ns."""
        for request in ended:
            self._runner.forget(request.number)
        iteration = self._iteration(plan, output, times, ended)
        released = self._clock.now_ns()
        ends = [end_record(request, released) for request in ended]
        self._emit.step(self.scheduler.take_deltas(), iteration, ends)
        self._emit_ns = self._clock.now_ns() - times.end

    def _iteration(
        self, plan: Plan, output: StepOutput, times: Times, ended: list[Request]
    ) -> Iteration:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Iteration(
            step=plan.step,
            begin_at_ns=times.begin,
            end_at_ns=times.end,
            plan_ns=times.planned - times.planned_from,
            launch_ns=times.launched - times.planned,
            wait_ns=times.waited - times.launched,
            commit_ns=times.end - times.waited,
            gap_ns=times.planned_from - times.begin,
            device_ns=output.device_ns,
            emit_ns=self._emit_ns,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            admission_stop=plan.admission_stop,
            admission_blocker=plan.admission_blocker,
            token_budget=plan.token_budget,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens,
            padding_tokens=output.padding_tokens,
            idle_rows=0,
            bucket=output.bucket,
            graph=output.graph,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            kv_tokens=scheduler.kv_tokens,
            kv_blocks_peak=plan.kv_blocks_peak,
            allocation_failures=plan.allocation_failures,
            lost_before=self._emit.lost,
            requests=plan.requests,
            start_positions=plan.start_positions,
            token_counts=plan.token_counts,
            kv_block_counts=plan.kv_block_counts,
            admitted=plan.admitted,
            admitted_cached_tokens=plan.admitted_cached_tokens,
            passed_over=plan.passed_over,
            passed_over_reasons=plan.passed_over_reasons,
            preempted=plan.preempted,
            preempted_causes=plan.preempted_causes,
            preempted_blocks=plan.preempted_blocks,
            preempted_lost_tokens=plan.preempted_lost_tokens,
            preempted_beneficiaries=plan.preempted_beneficiaries,
            finished=[request.number for request in ended],
        )


def _step_fault(step: int, error: Exception, now_ns: int) -> Fault:
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return Fault(
        fault_at_ns=now_ns,
        step=step,
        where="engine step",
        error=line,
        traceback="".join(traceback.format_exception(error)),
    )
