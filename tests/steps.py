"""Plans made by hand: the real runner driven row by row, without a scheduler.

Owns a loaded runner for a model's path and the rows that tests advance by as many tokens as they
like. Used by the tests of model and runner. Never decides anything: a test names every row and
every count.
"""

from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig, resolve
from engine.device import device_facts
from engine.messages import SamplingParams
from engine.plan import Plan, StepOutput
from engine.runner import ModelRunner
from engine.spec import read_spec

GREEDY = SamplingParams(temperature=0.0)


def load(path: Path, **settings: object) -> ModelRunner:
    """Return a runner in float32 with a pool of 400 blocks, one thread, not warmed up."""
    chosen: dict[str, object] = {"kv_blocks": 400, "engine_threads": 1, "max_num_seqs": 64}
    chosen["dtype"] = "f32"
    config = EngineConfig(model=str(path), **(chosen | settings))  # type: ignore[arg-type]
    spec = read_spec(str(path))
    return ModelRunner.build(
        resolve(config, spec, device_facts(config, spec)), spec, lambda stage, fraction: None
    )


@dataclass(eq=False)
class Row:
    """One sequence: its tokens, how many are computed, its blocks."""

    request: int
    tokens: list[int]
    table: list[int]
    sampling: SamplingParams = GREEDY
    computed: int = 0
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class Hand:
    """Drives a runner over rows; `add` gives each row blocks of its own, in no order."""

    def __init__(self, runner: ModelRunner, block_tokens: int = 16) -> None:
        self.runner = runner
        self.steps = 0
        self._block_tokens = block_tokens
        self._free = [1 + (index * 7) % 397 for index in range(397)]  # 7 and 397 share no factor
        self._requests = 0

    def add(self, prompt: list[int], outputs: int, sampling: SamplingParams = GREEDY) -> Row:
        """Return a row with blocks for its prompt and `outputs` tokens."""
        blocks = -(-(len(prompt) + outputs) // self._block_tokens)
        self._requests += 1
        table, self._free = self._free[:blocks], self._free[blocks:]
        assert len(table) == blocks, "the test needs a larger pool"
        return Row(self._requests, list(prompt), table, sampling)

    def free(self, row: Row) -> None:
        """Give a row's blocks to whoever comes next."""
        self._free = row.table + self._free

    def step(self, *parts: tuple[Row, int]) -> StepOutput:
        """Compute so many next tokens of each row; a row that reaches its last one samples."""
        self.steps += 1
        plan = plan_of(self.steps, parts)
        output = self.runner.run(plan).wait()
        tokens = iter(output.tokens)
        for (row, count), samples in zip(parts, plan.samples, strict=True):
            row.computed += count
            if samples:
                row.tokens.append(next(tokens))
        assert next(tokens, None) is None
        return output

    def finish(self, *rows: Row, outputs: int, chunk: int = 10**9) -> None:
        """Advance the rows together, at most `chunk` tokens each a step, to so many outputs."""
        while live := [row for row in rows if len(row.output) < outputs]:
            self.step(*((row, min(chunk, len(row.tokens) - row.computed)) for row in live))


def plan_of(step: int, parts: tuple[tuple[Row, int], ...]) -> Plan:
    """Return the plan that computes so many next tokens of each row."""
    plan = Plan(step=step, token_budget=sum(count for _, count in parts))
    for row, count in parts:
        last = row.computed + count
        assert 0 < count <= len(row.tokens) - row.computed
        plan.requests.append(row.request)
        plan.start_positions.append(row.computed)
        plan.token_counts.append(count)
        plan.token_ids.extend(row.tokens[row.computed : last])
        plan.block_tables.append(row.table)
        plan.kv_block_counts.append(len(row.table))
        plan.samples.append(last == len(row.tokens))
        plan.sampling.append(row.sampling)
        plan.output_indices.append(last - row.prompt)
    return plan
