"""The core: one iteration as plan, run, commit, emit, and the record that makes it visible.

Owns the step's timing and builds the Iteration, RequestStart and RequestEnd records; engine/loop.py
calls add, abort and step. Runner, Clock and Emit are handed in, the three seams that tests may
fake. Imports no torch, so that scheduling can be simulated and tested in milliseconds.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engine.faults import DeviceLost, Kind, fault_of, kind_of
from engine.messages import Abort, Gains, Submit
from engine.plan import Clock, PendingStep, Plan, Runner, StepOutput
from engine.request import Request, end_record, start_record
from engine.scheduler import Scheduler
from engine.step_model import StepTimes
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart, StepModel


class Emit(Protocol):
    """Where the core's news go. Nothing here may wait for anyone.

    lost: iterations dropped since the last one that was taken.
    """

    lost: int

    def start(self, record: RequestStart) -> None:
        """A sequence entered the queue."""
        ...

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        """A step was committed: what clients gain, its record, and who ended."""
        ...

    def step_model(self, record: StepModel) -> None:
        """The step model was fitted anew."""
        ...

    def fault(self, record: Fault) -> None:
        """A step failed; the service goes on."""
        ...


@dataclass(slots=True)
class Tile:
    """The wall time one iteration owns, in ns; what is neither part is the gap."""

    begin: int
    plan_ns: int = 0
    launch_ns: int = 0
    wait_ns: int = 0
    commit_ns: int = 0
    end: int = 0

    @property
    def gap_ns(self) -> int:
        """The rest of the tile."""
        parts = self.plan_ns + self.launch_ns + self.wait_ns + self.commit_ns
        return self.end - self.begin - parts


@dataclass(slots=True)
class Flight:
    """A planned step that is not committed; no pending step when it had no rows or failed.

    A void one was launched before it was known that the step it builds on had failed.
    """

    plan: Plan
    pending: PendingStep | None = None
    fault: Fault | None = None
    kind: Kind = "step"
    void: bool = False

    def fail(self, error: Exception, now_ns: int) -> None:
        """Keep what broke it."""
        self.kind = kind_of(error)
        self.fault = fault_of(error, where="engine step", now_ns=now_ns, step=self.plan.step)


class Core:
    """Drives a scheduler and a runner; `has_work` says whether a step would do anything.

    At loop depth 2 step n + 1 is planned and launched before step n is committed, so the device
    never waits for the host; ends and frees then come one step later.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        emit: Emit,
        times: StepTimes | None = None,
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._emit = emit
        self._times = times or StepTimes()
        self._tile_from = clock.now_ns()
        self._emit_ns = 0
        self._aborted = False
        self._depth = depth
        self._flights: deque[Flight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether sequences run or wait, or aborts are still to be recorded."""
        scheduler = self.scheduler
        live = len(scheduler.roster.running) > 0 or len(scheduler.roster.waiting) > 0
        return live or self._aborted or bool(self._flights)

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

    def opens_in_ns(self) -> int:
        """Return how long nothing can be done but wait for a batch to form, 0 otherwise."""
        if self._flights or self._aborted:
            return 0
        return self.scheduler.opens_in_ns(self._clock.now_ns())

    def rest(self) -> None:
        """Put time spent waiting for a batch to form on record, as an iteration without rows."""
        now = self._clock.now_ns()
        tile = Tile(begin=self._tile_from, end=now)
        self._tile_from = now
        self._report(self.scheduler.rest(), StepOutput(tokens=[], device_ns=0), tile, [])

    def step(self) -> None:
        """Plan, run, commit, emit: launch ahead up to the loop's depth, then commit the oldest."""
        tile = Tile(begin=self._tile_from)
        while len(self._flights) < self._depth and self._may_launch() and self._launch(tile):
            pass
        flight = self._flights.popleft()
        output = self._land(flight, tile)
        ended = self.scheduler.roster.take_ended()
        self._tile_from = tile.end
        self._report(flight.plan, output, tile, ended)
        if flight.fault and flight.kind == "device":
            raise DeviceLost(flight.fault.error)

    def _launch(self, tile: Tile) -> bool:
        """Plan and launch one step; False when there was nothing to launch."""
        began = self._clock.now_ns()
        plan = self.scheduler.plan(began)
        planned = self._clock.now_ns()
        tile.plan_ns += planned - began
        self._aborted = False
        flight = Flight(plan)
        if plan.requests:
            try:
                flight.pending = self._runner.run(plan)
            except Exception as error:  # noqa: BLE001  the engine ends requests, it never raises
                flight.fail(error, self._clock.now_ns())
            tile.launch_ns += self._clock.now_ns() - planned
        elif self._flights and not plan.preempted:
            # All that lives is in flight already: there is no such step.
            self.scheduler.discard(plan)
            return False
        self._flights.append(flight)
        return bool(plan.requests)

    def _may_launch(self) -> bool:
        """Whether no step in flight has failed: what its sequences are is not known yet."""
        return not any(flight.fault or flight.void for flight in self._flights)

    def _land(self, flight: Flight, tile: Tile) -> StepOutput:
        """Await a step and take its results in; one that failed ends its sequences instead."""
        began = self._clock.now_ns()
        output = StepOutput(tokens=[], device_ns=0)
        if flight.pending:
            try:
                output = flight.pending.wait()
            except Exception as error:  # noqa: BLE001  the engine ends requests, it never raises
                flight.fail(error, self._clock.now_ns())
        waited = self._clock.now_ns()
        if flight.fault:
            self._fail(flight, flight.fault, waited)
        elif flight.void:
            self.scheduler.void(flight.plan, waited)
        else:
            self.scheduler.commit(flight.plan, output, waited)
            self._observe(flight.plan, output)
        tile.end = self._clock.now_ns()
        tile.wait_ns = waited - began
        tile.commit_ns = tile.end - waited
        return output

    def _fail(self, flight: Flight, fault: Fault, now_ns: int) -> None:
        """End whom a failed step must end; what was launched upon it is void, if anybody goes on.

        A second failure upon the first is none of its sequences' doing.
        """
        self._emit.fault(fault)
        if flight.void:
            self.scheduler.void(flight.plan, now_ns)
        elif flight.kind == "memory":
            error = f"memory ran out in step {flight.plan.step}, and this was its newest request"
            if self.scheduler.is_tight:
                self.scheduler.give_way(flight.plan, error, now_ns)
            else:
                self.scheduler.retry(flight.plan, now_ns)
            for later in self._flights:
                later.void = True
        else:
            self.scheduler.roll_back(flight.plan, fault.error, now_ns)

    def _observe(self, plan: Plan, output: StepOutput) -> None:
        """Let the step model learn from a step; a row reads its whole context once."""
        if not plan.requests:
            return
        fitted = self._times.observe(
            step=plan.step,
            prefill=plan.prefill_tokens,
            decode=plan.decode_tokens + output.padding_tokens + len(plan.idle_positions),
            context=sum(plan.start_positions) + len(plan.token_ids) + sum(plan.idle_positions),
            device_ns=output.device_ns,
        )
        if fitted:
            self._emit.step_model(fitted)

    def _report(self, plan: Plan, output: StepOutput, tile: Tile, ended: list[Request]) -> None:
        """Build the step's records and emit them; the time this takes is the next one's emit_ns."""
        for request in ended:
            self._runner.forget(request.number)
        iteration = self._iteration(plan, output, tile, ended)
        released = self._clock.now_ns()
        ends = [end_record(request, released) for request in ended]
        self._emit.step(self.scheduler.roster.take_gains(), iteration, ends)
        self._emit_ns = self._clock.now_ns() - tile.end

    def _iteration(
        self, plan: Plan, output: StepOutput, tile: Tile, ended: list[Request]
    ) -> Iteration:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Iteration(
            step=plan.step,
            begin_at_ns=tile.begin,
            end_at_ns=tile.end,
            plan_ns=tile.plan_ns,
            launch_ns=tile.launch_ns,
            wait_ns=tile.wait_ns,
            commit_ns=tile.commit_ns,
            gap_ns=tile.gap_ns,
            device_ns=output.device_ns,
            emit_ns=self._emit_ns,
            running=len(scheduler.roster.running),
            waiting=len(scheduler.roster.waiting),
            admission_stop=plan.admission_stop,
            admission_blocker=plan.admission_blocker,
            token_budget=plan.token_budget,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens,
            padding_tokens=output.padding_tokens,
            idle_rows=len(plan.idle_positions),
            bucket=output.bucket,
            graph=output.graph,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            kv_tokens=scheduler.roster.kv_tokens - pool.shared * pool.block_tokens,
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
