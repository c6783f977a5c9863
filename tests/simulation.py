"""The real core over a fake runner and a fake clock: scheduling in milliseconds, one line a step.

Owns the fakes (the three seams) and the text of a golden timeline. Tests of scheduler, core and
telemetry use it. Never re-implements a decision of the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.core import Core, Emit
from engine.invariants import check
from engine.kv import KVPool
from engine.messages import Abort, Delta, Gains, SamplingParams, Submit
from engine.plan import Plan, StepOutput
from engine.policies import POLICIES
from engine.request import Request
from engine.rows import PLACEHOLDER
from engine.scheduler import Scheduler
from engine.step_model import StepTimes
from telemetry.records import Fault, Iteration, RequestEnd, RequestStart, StepModel

EOS = 2
STEP_NS = 1_000_000
TOKEN_NS = 10_000


class FakeClock:
    """Time stands still until somebody works."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


class FakeStep:
    """A launched step; waiting for it takes until the device, which runs in order, is done."""

    def __init__(self, output: StepOutput, clock: FakeClock, done_at_ns: int) -> None:
        self._output = output
        self._clock = clock
        self._done_at_ns = done_at_ns

    def wait(self) -> StepOutput:
        self._clock.ns = max(self._clock.ns, self._done_at_ns)
        return self._output


def token_of(request: int, index: int) -> int:
    """The token that a sequence samples at an output index: never EOS, never random."""
    return 100 + (request * 7919 + index * 104729) % 1000


class FakeRunner:
    """Answers with token_of; `stops` maps (request, output index) to EOS; checks every plan.

    It keeps what a device would: the token whose keys and values lie at each place of each block.
    Whatever a row takes as computed must be there, written by an earlier step or by this pack.
    """

    def __init__(self, clock: FakeClock, block_tokens: int) -> None:
        self.stops: set[tuple[int, int]] = set()
        self.fails: Callable[[Plan], Exception | None] = lambda plan: None
        self.prompts: dict[int, list[int]] = {}
        self._written: dict[tuple[int, int], int] = {}
        self._reached: dict[int, tuple[int, int]] = {}
        self._clock = clock
        self._block_tokens = block_tokens
        self._device_free_at_ns = 0

    def run(self, plan: Plan) -> FakeStep:
        if error := self.fails(plan):
            raise error
        tokens, offset = [], 0
        for row, request in enumerate(plan.requests):
            count = plan.token_counts[row]
            self._write(plan, row, plan.token_ids[offset : offset + count])
            offset += count
            if plan.samples[row]:
                end = plan.start_positions[row] + count
                assert plan.output_indices[row] == end - len(self.prompts[request])
                tokens.append(self._token(request, end))
        assert offset == len(plan.token_ids)
        for row, request in enumerate(plan.requests):
            self._read(plan, row, request)
        device_ns = STEP_NS + TOKEN_NS * (offset + len(plan.idle_token_ids))
        begin = max(self._clock.ns, self._device_free_at_ns)
        self._device_free_at_ns = begin + device_ns
        output = StepOutput(tokens=tokens, device_ns=device_ns)
        return FakeStep(output, self._clock, self._device_free_at_ns)

    def _token(self, request: int, position: int) -> int:
        """Return what truly stands at a position of a sequence."""
        prompt = self.prompts[request]
        if position < len(prompt):
            return prompt[position]
        index = position - len(prompt)
        return EOS if (request, index) in self.stops else token_of(request, index)

    def _place(self, plan: Plan, row: int, position: int) -> tuple[int, int]:
        block = plan.block_tables[row][position // self._block_tokens]
        assert block != 0, "block 0 belongs to padding"
        return block, position % self._block_tokens

    def _write(self, plan: Plan, row: int, ids: list[int]) -> None:
        request, start = plan.requests[row], plan.start_positions[row]
        assert PLACEHOLDER not in ids[:-1]
        for position, token in enumerate(ids, start):
            true = self._token(request, position)
            assert token in (true, PLACEHOLDER), "not the sequence's own token"
            self._written[self._place(plan, row, position)] = true

    def _read(self, plan: Plan, row: int, request: int) -> None:
        """Check a row's whole past when it does not simply go on where it was."""
        start, end = plan.start_positions[row], plan.start_positions[row] + plan.token_counts[row]
        if self._reached.get(request) != (start, int(plan.reserved.epochs[row])):
            for position in range(start):
                there = self._written.get(self._place(plan, row, position))
                assert there == self._token(request, position), "reads what was never written"
        self._reached[request] = (end, int(plan.reserved.epochs[row]))

    def forget(self, request: int) -> None:
        self.prompts.pop(request, None)
        self._reached.pop(request, None)

    @property
    def kept(self) -> int:
        """Sequences that it still knows."""
        return len(self.prompts)


@dataclass
class Recorder:
    """Keeps everything that the core emits."""

    lost: int = 0
    starts: list[RequestStart] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    step_models: list[StepModel] = field(default_factory=list)

    def start(self, record: RequestStart) -> None:
        self.starts.append(record)

    def step(self, gains: Gains, iteration: Iteration, ends: list[RequestEnd]) -> None:
        self.deltas.extend(gains.each())
        self.iterations.append(iteration)
        self.ends.extend(ends)

    def step_model(self, record: StepModel) -> None:
        self.step_models.append(record)

    def fault(self, record: Fault) -> None:
        self.faults.append(record)


class Simulation:
    """A core whose requests have one-letter names in the order of their arrival."""

    def __init__(
        self,
        *,
        emit: Emit | None = None,
        depth: int = 1,
        is_ready: Callable[[Request], bool] | None = None,
        **settings: object,
    ) -> None:
        defaults: dict[str, object] = {
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 48,
            "kv_blocks": 8,
            "block_size": 16,
            "dtype": "f32",
            "device": "cpu",
            "scheduling_policy": "decode_first",
            "enable_prefix_caching": False,
        }
        self.config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
        assert self.config.kv_blocks is not None
        self.clock = FakeClock()
        self.runner = FakeRunner(self.clock, self.config.block_size)
        self.emitted = Recorder()
        pool = KVPool(blocks=self.config.kv_blocks, block_tokens=self.config.block_size)
        self.times = StepTimes()
        policy = POLICIES[self.config.scheduling_policy](self.config, self.times)
        self.scheduler = Scheduler(
            config=self.config, pool=pool, policy=policy, eos_ids=(EOS,), is_ready=is_ready
        )
        self.core = Core(
            scheduler=self.scheduler,
            runner=self.runner,
            clock=self.clock,
            emit=emit or self.emitted,
            times=self.times,
            depth=depth,
        )
        self.names: dict[int, str] = {}

    def add(
        self,
        name: str,
        prompt_tokens: int,
        max_tokens: int,
        *,
        stop_at: int = 0,
        shared: int = 0,
        **more: object,
    ) -> int:
        """Submit a sequence; with stop_at n its n-th output token is EOS.

        The first `shared` tokens of its prompt are the same for everybody.
        """
        number = len(self.names) + 1
        self.names[number] = name
        if stop_at:
            self.runner.stops.add((number, stop_at - 1))
        self.clock.ns += 1
        common = [7 + i for i in range(min(shared, prompt_tokens))]
        own = [token_of(number, -1 - i) for i in range(prompt_tokens - len(common))]
        self.runner.prompts[number] = common + own
        self.core.add(
            Submit(
                request=number,
                request_id=f"req-{name}",
                prompt=common + own,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=0.0),
                received_at_ns=self.clock.ns,
                **more,  # type: ignore[arg-type]
            )
        )
        return number

    def cancel(self, name: str, *, delivered: int = 0) -> None:
        """Abort by name, as a client that went away."""
        number = next(number for number, other in self.names.items() if other == name)
        self.core.abort(
            Abort(
                request=number,
                finish="cancelled",
                cancel_cause="client",
                delivered_tokens=delivered,
            )
        )

    def step(self, count: int = 1) -> None:
        """Run steps, checking every invariant after each."""
        for _ in range(count):
            self.core.step()
            check(self.scheduler)

    def drain(self, limit: int = 2000) -> None:
        """Step until nothing is left; too many steps mean no progress."""
        while self.core.has_work:
            if delay_ns := self.core.opens_in_ns():
                self.clock.ns += delay_ns
                self.core.rest()
                continue
            self.step()
            limit -= 1
            assert limit > 0, "the engine makes no progress"

    def outputs(self) -> dict[str, list[int]]:
        """Return every sequence's output tokens."""
        tokens: dict[str, list[int]] = {name: [] for name in self.names.values()}
        for delta in self.emitted.deltas:
            tokens[self.names[delta.request]].extend(delta.tokens)
        return tokens

    def timeline(self) -> str:
        """Return the golden text: one line an iteration, repeats of the same shape folded."""
        lines: list[str] = []
        highest: dict[int, int] = {}
        previous, repeats = "", 0
        prompts = {start.request: start.prompt_tokens for start in self.emitted.starts}
        for record in self.emitted.iterations:
            shape = self._line(record, prompts, highest, positions=False)
            if shape == previous:
                repeats += 1
                self._note(record, highest)
                continue
            if repeats:
                lines.append(f"          ... {repeats} more like it")
            previous, repeats = shape, 0
            line = self._line(record, prompts, highest, positions=True)
            lines.append(f"step {record.step:3} | {line}")
            self._note(record, highest)
        if repeats:
            lines.append(f"          ... {repeats} more like it")
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _note(self, record: Iteration, highest: dict[int, int]) -> None:
        for row, request in enumerate(record.requests):
            end = record.start_positions[row] + record.token_counts[row]
            highest[request] = max(highest.get(request, 0), end)

    def _line(
        self,
        record: Iteration,
        prompts: dict[int, int],
        highest: dict[int, int],
        *,
        positions: bool,
    ) -> str:
        rows = []
        for row, request in enumerate(record.requests):
            start, count = record.start_positions[row], record.token_counts[row]
            recompute = min(count, max(0, highest.get(request, 0) - start))
            prefill = min(count, max(0, prompts[request] - start)) - recompute
            prefill = max(0, prefill)
            parts = [(recompute, "r"), (prefill, "p"), (count - recompute - prefill, "d")]
            kinds = "".join(f"{tokens}{kind}" for tokens, kind in parts if tokens)
            rows.append(f"{self.names[request]}{f'@{start}' if positions else ''}:{kinds}")
        names = self.names
        stop = record.admission_stop
        if record.admission_blocker:
            stop = f"{stop} {names[record.admission_blocker]}"
        preempted = " ".join(
            f"{names[victim]}>{names[beneficiary]}(-{lost})"
            for victim, beneficiary, lost in zip(
                record.preempted,
                record.preempted_beneficiaries,
                record.preempted_lost_tokens,
                strict=True,
            )
        )
        passed = "".join(names[request] for request in record.passed_over)
        marks = "".join(names[request] for request in record.admitted)
        ends = "".join(names[request] for request in record.finished)
        total = self.scheduler.pool.blocks_total
        return (
            f"{'  '.join(rows):44} | kv {record.kv_blocks_used:2}/{total} peak "
            f"{record.kv_blocks_peak:2} | run {record.running} wait {record.waiting} | "
            f"{stop:12} | in {marks or '-':4} | over {passed or '-':3} | "
            f"preempt {preempted or '-':12} | out {ends or '-'}"
        )
