"""Scheduler, pool and core under random traffic: invariants after every step, laws at the end.

The machine drives the real core with arrivals, aborts and failing steps over random pools and
budgets; `check()` runs after each step and the fake runner holds every plan to what a real runner
needs. At the end the records alone must satisfy the conservation laws.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.config import (
    BATCHING_MODES,
    POLICY_NAMES,
    ConfigError,
    DeviceFacts,
    EngineConfig,
    resolve,
)
from engine.invariants import check
from engine.kv import KVPool
from engine.messages import Abort
from engine.rope import Rope
from engine.spec import ModelSpec
from tests.simulation import Simulation, token_of

SPEC = ModelSpec(
    path="x",
    architecture="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab_size=512,
    rope=Rope(),
    norm_eps=1e-5,
    tied_head=True,
    model_len=8192,
    bos_id=None,
    eos_ids=(2,),
    parameters=1000,
)
FACTS = DeviceFacts(device="cpu", auto_dtype="f32", threads=2)


def assert_laws(simulation: Simulation) -> None:
    """Hold the records, and nothing else, to the conservation laws."""
    emitted = simulation.emitted
    starts = {start.request: start for start in emitted.starts}
    ends = Counter(end.request for end in emitted.ends)
    assert ends == Counter(dict.fromkeys(starts, 1)), "one end for each start"
    finished = Counter(number for record in emitted.iterations for number in record.finished)
    assert finished == ends
    scheduled, lost, cached = Counter[int](), Counter[int](), Counter[int]()
    recomputed = Counter[int]()
    # A token in flight may end a sequence after it was preempted: then nothing stays computed.
    gone: dict[int, int] = {}
    for record in emitted.iterations:
        scheduled.update(dict(zip(record.requests, record.token_counts, strict=True)))
        lost_now = dict(zip(record.preempted, record.preempted_lost_tokens, strict=True))
        lost.update(lost_now)
        gone |= lost_now
        hits = dict(zip(record.admitted, record.admitted_cached_tokens, strict=True))
        cached.update(hits)
        for number, hit in hits.items():
            recomputed[number] += max(0, gone.pop(number, 0) - hit)
    for end in emitted.ends:
        number = end.request
        computed = scheduled[number] + cached[number] - lost[number] - end.dropped_tokens
        assert computed >= 0
        if end.finish in ("stop", "length") and number not in gone:
            assert computed == end.prompt_tokens + end.output_tokens - 1
        assert end.recomputed_tokens == recomputed[number]
        counts = (end.output_tokens, end.wasted_tokens, end.dropped_tokens, end.preemptions)
        assert min(counts) >= 0
        assert end.wasted_tokens <= end.output_tokens <= starts[number].max_tokens


def assert_tiles(simulation: Simulation) -> None:
    """Tiles neither overlap nor leave busy time out, and their parts sum to them."""
    previous_end = 0
    for step, record in enumerate(simulation.emitted.iterations, 1):
        assert record.step == step
        parts = record.plan_ns + record.launch_ns + record.wait_ns
        parts += record.commit_ns + record.gap_ns
        assert parts == record.end_at_ns - record.begin_at_ns
        assert record.begin_at_ns == previous_end
        assert record.prefill_tokens + record.decode_tokens == sum(record.token_counts)
        assert sum(record.token_counts) <= record.token_budget
        previous_end = record.end_at_ns


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic over a random engine."""

    @initialize(
        blocks=st.integers(2, 24),
        block_tokens=st.sampled_from([1, 4, 16]),
        seqs=st.integers(1, 6),
        budget=st.integers(0, 40),
        chunked=st.booleans(),
        policy=st.sampled_from(POLICY_NAMES),
        batching=st.sampled_from(BATCHING_MODES),
        depth=st.integers(1, 2),
        caching=st.booleans(),
        caps=st.tuples(*[st.one_of(st.none(), st.integers(1, 9))] * 3),
    )
    def build(
        self,
        blocks: int,
        block_tokens: int,
        seqs: int,
        budget: int,
        chunked: bool,
        policy: str,
        batching: str,
        depth: int,
        caching: bool,
        caps: tuple[int | None, int | None, int | None],
    ) -> None:
        asked = EngineConfig(
            kv_blocks=blocks,
            block_size=block_tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + budget,
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
            batching=batching,
            long_prefill_tokens=caps[0],
            partial_prefills_max=caps[1],
            tenant_seqs_max=caps[2],
            enable_prefix_caching=caching,
        )
        config = resolve(asked, SPEC, FACTS)
        settings = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
        self.simulation = Simulation(depth=depth, **settings)
        assert config.max_model_len is not None
        self.model_len = config.max_model_len
        self.failures = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        prompt = data.draw(st.integers(1, self.model_len - 1))
        room = self.model_len - prompt
        output = data.draw(st.integers(1, room))
        stop_at = data.draw(st.integers(0, output))
        self.simulation.add(
            f"r{len(self.simulation.names)}",
            prompt,
            output,
            stop_at=stop_at,
            shared=data.draw(st.sampled_from([0, 0, 20, 100])),
            tenant=data.draw(st.sampled_from(["red", "green", "blue"])),
            priority=data.draw(st.integers(-2, 2)),
        )

    @rule(data=st.data())
    @precondition(lambda self: self.simulation.names)
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.simulation.names)))
        delivered = data.draw(st.integers(0, 5))
        self.simulation.core.abort(
            Abort(request=number, finish="cancelled", delivered_tokens=delivered)
        )

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.simulation.core.has_work:
                self.simulation.step()

    @rule()
    @precondition(lambda self: self.failures < 2)
    def failing_step(self) -> None:
        self.failures += 1
        self.simulation.runner.fails = lambda plan: RuntimeError("the device is gone")
        self.simulation.core.step()
        self.simulation.runner.fails = lambda plan: None

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "simulation"):
            check(self.simulation.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.drain(limit=20_000)
        assert self.simulation.scheduler.pool.used == 0
        assert not self.simulation.runner.kept, "the runner keeps something of an ended sequence"
        assert_laws(self.simulation)
        assert_tiles(self.simulation)
        errors = {end.request for end in self.simulation.emitted.ends if end.finish == "error"}
        for number, name in self.simulation.names.items():
            tokens = self.simulation.outputs()[name]
            stops = self.simulation.runner.stops
            expected = [
                2 if (number, index) in stops else token_of(number, index)
                for index in range(len(tokens))
            ]
            assert tokens == expected, "scheduling changed what a sequence says"
        assert not errors or self.failures


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_pool_gives_all_or_nothing() -> None:
    pool = KVPool(blocks=5, block_tokens=16)
    assert pool.allocate(8) is None
    assert pool.free == 5
    blocks = pool.allocate(5)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    pool.release(blocks)
    pool.check([])


def test_pool_refuses_a_double_free() -> None:
    pool = KVPool(blocks=5, block_tokens=16)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_failing_step_ends_its_requests_and_spares_the_others() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add("A", 4, 4)
    simulation.add("B", 4, 4)
    simulation.runner.fails = lambda plan: RuntimeError("no such kernel\nsecond line")
    simulation.step()
    simulation.runner.fails = lambda plan: None
    simulation.drain()
    finishes = {end.request_id: (end.finish, end.error) for end in simulation.emitted.ends}
    assert finishes == {
        "req-A": ("error", "RuntimeError: no such kernel"),
        "req-B": ("length", None),
    }
    assert [fault.step for fault in simulation.emitted.faults] == [1]
    assert_laws(simulation)


def test_a_request_that_can_never_run_ends_with_an_error() -> None:
    simulation = Simulation(max_model_len=64, kv_blocks=4)
    simulation.add("A", 64, 1)
    simulation.step()
    (end,) = simulation.emitted.ends
    assert (end.finish, end.error) == (
        "error",
        "prompt and max_tokens are 65 tokens; the limit is 64",
    )


def test_abort_is_idempotent_and_unknown_ids_are_left_alone() -> None:
    simulation = Simulation()
    number = simulation.add("A", 4, 8)
    simulation.step(2)
    for _ in range(5):
        simulation.cancel("A", delivered=1)
    simulation.core.abort(Abort(request=99, finish="cancelled"))
    simulation.drain()
    (end,) = simulation.emitted.ends
    assert (end.request, end.finish, end.output_tokens, end.wasted_tokens) == (
        number,
        "cancelled",
        2,
        1,
    )
    last = [delta for delta in simulation.emitted.deltas if delta.finish]
    assert len(last) == 1


def cancelled_in(state: str) -> Simulation:
    """Return a simulation whose A is in the named state."""
    settings: dict[str, dict[str, object]] = {
        "mid-prefill": {"max_num_batched_tokens": 8, "max_num_seqs": 2},
        "preempted": {"kv_blocks": 5},
        "held": {"batching": "static", "kv_blocks": 16},
        "finishing": {"depth": 2},
        "in flight": {"depth": 2},
    }
    simulation = Simulation(**settings.get(state, {}))  # type: ignore[arg-type]
    if state == "waiting":
        simulation.add("Z", 8, 8)
        simulation.step()
        simulation.add("A", 100, 20)
    elif state == "preempted":
        simulation.add("Z", 30, 30)
        simulation.add("A", 14, 30)
        while simulation.scheduler.roster.requests[2].state != "preempted":
            simulation.step()
    elif state == "held":
        simulation.add("A", 8, 2)
        simulation.add("Z", 8, 9)
        simulation.step(3)
    else:
        simulation.add("A", 20, 4, stop_at=2 if state == "finishing" else 0)
        simulation.step(1 if state in ("mid-prefill", "in flight") else 2)
    return simulation


@pytest.mark.parametrize(
    "state", ["waiting", "mid-prefill", "decoding", "preempted", "held", "finishing", "in flight"]
)
def test_a_cancel_in_any_state_frees_once_and_ends_once(state: str) -> None:
    simulation = cancelled_in(state)
    for _ in range(3):
        simulation.cancel("A")
        check(simulation.scheduler)
    simulation.drain()
    ends = [end for end in simulation.emitted.ends if end.request_id == "req-A"]
    assert len(ends) == 1
    decided_before = state in ("held", "finishing")
    assert (ends[0].finish == "cancelled") != decided_before
    finishes = [
        delta.finish
        for delta in simulation.emitted.deltas
        if delta.finish and simulation.names[delta.request] == "A"
    ]
    assert len(finishes) == 1
    assert simulation.scheduler.pool.used == 0
    assert_laws(simulation)


def test_blocks_return_to_the_same_idle_number() -> None:
    """Whatever the lengths are around a block's border, no block stays behind."""
    simulation = Simulation(kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    for turn in range(60):
        total = 16 * (1 + turn % 5) + (-1, 0, 1)[turn % 3]
        simulation.add(f"r{turn}", max(1, total // 2), total - max(1, total // 2))
        simulation.step()
    simulation.drain()
    assert simulation.scheduler.pool.used == 0
    assert_laws(simulation)


@pytest.mark.parametrize("prompt_tokens", [1, 15, 16, 17, 62, 63])
def test_one_token_ends_in_the_prefill_step(prompt_tokens: int) -> None:
    simulation = Simulation(max_model_len=64, kv_blocks=4, max_num_batched_tokens=64)
    simulation.add("A", prompt_tokens, 1)
    simulation.step()
    (end,) = simulation.emitted.ends
    assert (end.output_tokens, end.finish) == (1, "length")
    assert end.first_token_at_ns == end.prefill_finished_at_ns
    assert simulation.scheduler.pool.used == 0


def test_the_prompt_ends_once() -> None:
    """Its last chunk brings the first token; later tokens do not move that instant."""
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.add("A", 40, 5)
    simulation.drain()
    (end,) = simulation.emitted.ends
    third = simulation.emitted.iterations[2]
    assert end.prefill_finished_at_ns == end.first_token_at_ns
    assert third.begin_at_ns < (end.first_token_at_ns or 0) <= third.end_at_ns


def test_resolve_makes_one_effective_limit() -> None:
    config = resolve(EngineConfig(kv_blocks=10, max_model_len=8000), SPEC, FACTS)
    assert config.max_model_len == 160
    off = EngineConfig(kv_blocks=100, max_num_batched_tokens=64, enable_chunked_prefill=False)
    assert resolve(off, SPEC, FACTS).max_num_batched_tokens == 1600


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens"),
        ({"kv_blocks": 1}, "--kv-blocks"),
        ({"kv_cache_memory": 1000}, "--kv-cache-memory"),
        ({"scheduling_policy": "lottery"}, "--scheduling-policy"),
        ({"decode_buckets": "1,x"}, "--decode-buckets"),
        ({"decode_buckets": "0"}, "--decode-buckets"),
        ({"engine_threads": 9999}, "--engine-threads"),
    ],
)
def test_resolve_names_the_flag(wrong: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        resolve(EngineConfig(**wrong), SPEC, FACTS)  # type: ignore[arg-type]
