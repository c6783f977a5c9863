"""A brute-force oracle of admission: for all who wait, the first failed check and its blocker.

It keeps its own account of every sequence from the traffic and the records (ceilings and sums, no
code of the engine), replays each iteration in rank order, and must find the recorded stop, blocker
and admissions. Random runs over pools, budgets, slots, chunking and policies.
"""

import random
from dataclasses import dataclass, field

import pytest

from telemetry.records import Iteration
from tests.simulation import Simulation


@dataclass
class Account:
    """What the oracle knows of one sequence."""

    number: int
    arrived: int
    level: int
    prompt: int
    outputs: int = 0
    computed: int = 0
    blocks: int = 0
    runs: bool = False


@dataclass
class Oracle:
    """The engine's settings, and everybody alive."""

    budget: int
    slots: int
    pool: int
    block: int
    chunked: bool
    age_ns: int
    by_level: bool
    alive: dict[int, Account] = field(default_factory=dict)

    def needed(self, account: Account) -> int:
        """Blocks for all known tokens and one more."""
        return -(-(account.prompt + account.outputs + 1) // self.block)

    def rank(self, account: Account) -> tuple[int, int]:
        moved = account.level * self.age_ns if self.by_level else 0
        return (account.arrived + moved, account.number)

    def used(self) -> int:
        return sum(account.blocks for account in self.alive.values() if account.runs)

    def replay(self, record: Iteration) -> None:
        """Check one iteration against the account, and take it in."""
        for number in record.preempted:
            account = self.alive[number]
            assert account.runs
            account.runs, account.blocks, account.computed = False, 0, 0
        left = self.budget
        rows = dict(zip(record.requests, record.token_counts, strict=True))
        for number, count in rows.items():
            account = self.alive[number]
            if account.runs:
                left -= count
                account.blocks = max(account.blocks, -(-(account.computed + count) // self.block))
        line = sorted((a for a in self.alive.values() if not a.runs), key=self.rank)
        admitted: list[int] = []
        stop, blocker = "no_waiting", None
        for account in line:
            reason = self.first_failed(account, left, kv_preempted="kv" in record.preempted_causes)
            if reason is not None:
                stop, blocker = reason, account.number
                break
            account.runs, account.blocks = True, self.needed(account)
            admitted.append(account.number)
            share = min(account.prompt + account.outputs - account.computed, left)
            assert rows[account.number] == share
            left -= share
        assert record.admitted == admitted, record
        assert (record.admission_stop, record.admission_blocker) == (stop, blocker), record
        for number, count in rows.items():
            account = self.alive[number]
            account.computed += count
            if account.computed == account.prompt + account.outputs:
                account.outputs += 1
        for number in record.finished:
            self.alive.pop(number, None)
        assert record.kv_blocks_used == self.used(), record
        assert record.running == sum(account.runs for account in self.alive.values())
        assert record.waiting == sum(not account.runs for account in self.alive.values())

    def first_failed(self, account: Account, left: int, *, kv_preempted: bool) -> str | None:
        running = sum(other.runs for other in self.alive.values())
        if running >= self.slots:
            return "seqs"
        todo = account.prompt + account.outputs - account.computed
        if left == 0 or (not self.chunked and todo > left):
            return "budget"
        keep = max(1, self.pool // 100) if running else 0
        if kv_preempted or self.needed(account) > self.pool - self.used() - keep:
            return "kv"
        return None


def random_run(seed: int, policy: str) -> int:
    """Drive one random engine beside the oracle; return how many steps were checked."""
    pick = random.Random(seed)
    block, pool = pick.choice([(1, 40), (4, 30), (16, 12), (16, 300)])
    slots, chunked = pick.randrange(1, 7), pick.random() < 0.7
    model_len = min(96, block * pool)
    budget = slots + pick.randrange(60) if chunked else max(slots, model_len)
    simulation = Simulation(
        kv_blocks=pool,
        block_size=block,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=model_len,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
        policy_preemptions_max=0,
        priority_age_ms=5,
    )
    oracle = Oracle(
        budget=budget,
        slots=slots,
        pool=pool,
        block=block,
        chunked=chunked,
        age_ns=5_000_000,
        by_level=policy == "priority",
    )
    for turn in range(120):
        if turn < 80 and pick.random() < 0.5:
            for _ in range(pick.randrange(4)):
                prompt = pick.randrange(1, model_len)
                output = pick.randrange(1, model_len - prompt + 1)
                level = pick.randrange(-1, 3)
                stop_at = pick.choice([0, 0, pick.randrange(1, output + 1)])
                name = f"r{len(simulation.names)}"
                number = simulation.add(name, prompt, output, stop_at=stop_at, priority=level)
                arrived = simulation.clock.ns
                oracle.alive[number] = Account(number, arrived, level, prompt)
        if pick.random() < 0.1 and oracle.alive:
            number = pick.choice(sorted(oracle.alive))
            simulation.cancel(simulation.names[number])
            del oracle.alive[number]
        if simulation.core.has_work:
            seen = len(simulation.emitted.iterations)
            simulation.step()
            for record in simulation.emitted.iterations[seen:]:
                oracle.replay(record)
    return len(simulation.emitted.iterations)


@pytest.mark.parametrize("policy", ["fcfs", "decode_first", "priority"])
def test_the_record_agrees_with_the_oracle(policy: str) -> None:
    steps = sum(random_run(seed, policy) for seed in range(60))
    assert steps > 2000
