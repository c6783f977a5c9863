"""Who may be admitted: the closed list of checks, in its order, and who can never be.

Owns the answer to "why does this request wait?": the first check that refuses. The scheduler asks
for the head of the line and records the answer as admission_stop. Reads everything, changes
nothing.
"""

from collections.abc import Callable

from engine.batching import Continuous
from engine.config import EngineConfig
from engine.draft import Draft
from engine.kv import KVPool
from engine.policies import Policy, View
from engine.request import Request
from telemetry.records import AdmissionStop


class Admission:
    """The checks over one engine's limits, pool, policy and batching mode."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        pool: KVPool,
        policy: Policy,
        batching: Continuous,
        is_ready: Callable[[Request], bool] | None,
    ) -> None:
        assert config.max_model_len is not None, "the configuration is not resolved"
        self._config = config
        self._pool = pool
        self._policy = policy
        self._batching = batching
        self._is_ready = is_ready
        self._model_len = config.max_model_len
        self._watermark = max(1, pool.blocks_total // 100)

    def infeasible(self, request: Request) -> str | None:
        """Return why a sequence could never run, even alone."""
        submit = request.submit
        total = request.prompt_tokens + submit.max_tokens
        if request.prompt_tokens < 1 or submit.max_tokens < 1:
            return "a prompt and max_tokens need at least one token"
        if total > self._model_len:
            return f"prompt and max_tokens are {total} tokens; the limit is {self._model_len}"
        return None

    def first_refusal(
        self, draft: Draft, request: Request | None, view: View
    ) -> AdmissionStop | None:
        """Return the first check that keeps a request out, None when it may be admitted."""
        if request is None:
            return "no_waiting"
        if self._is_closed(draft, view):
            return "batch_closed"
        if len(view.running) >= self._config.max_num_seqs:
            return "seqs"
        if draft.left <= 0 and not self._batching.fixed:
            return "budget"  # known before the prompt's blocks are looked up
        hits = self.hits(request)
        pending = request.pending - len(hits) * self._pool.block_tokens
        if stop := self._over_budget(draft, pending):
            return stop
        if self._waits_for_leader(request) or (self._is_ready and not self._is_ready(request)):
            return "dependency"
        refusal = self._policy.refuse(request, view)
        if refusal == "slo" or (not self._batching.fixed and draft.share(pending) <= 0):
            return "slo"
        if "kv" in draft.plan.preempted_causes or not self._fits(request, hits, view):
            return "kv"
        return refusal

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether a sibling is computing the prompt whose blocks this one can share in a moment.

        One that does not run is not waited for: it may be preempted for long, or gone.
        """
        leader = request.leader
        if leader is None or not self._config.enable_prefix_caching or not request.may_share:
            return False
        shareable = (request.prompt_tokens - 1) // self._pool.block_tokens
        shared = shareable * self._pool.block_tokens
        return leader.state == "running" and leader.computed < shared

    def _is_closed(self, draft: Draft, view: View) -> bool:
        """Whether the batch takes nobody now; one that is forming stays open for its plan."""
        if not self._batching.fixed or draft.plan.admitted:
            return False
        opens_in_ns = self._batching.opens_in_ns(
            running=len(view.running), waiting=view.waiting, now_ns=view.now_ns
        )
        return opens_in_ns != 0

    def _over_budget(self, draft: Draft, pending: int) -> AdmissionStop | None:
        """Return the token check that fails; a forming fixed batch takes its tokens later."""
        if self._batching.fixed:
            return None
        if not self._config.enable_chunked_prefill and pending > draft.left:
            return "budget"
        partials_max = self._config.partial_prefills_max
        if partials_max is None or draft.partials < partials_max:
            return None
        return "prefill_cap" if draft.share(pending) < pending else None

    def hits(self, request: Request) -> list[int]:
        """Return the cached blocks an admission would share: at least one token stays to compute.

        Of a waiting sequence every known token has been read, or is a placeholder past the last
        full block that counts.
        """
        if not self._config.enable_prefix_caching or not request.may_share:
            return []
        full = min(request.known - 1, request.read) // self._pool.block_tokens
        return self._pool.lookup(request.digests_of(full, self._pool.block_tokens))

    def _fits(self, request: Request, hits: list[int], view: View) -> bool:
        """Whether the whole request may reserve now, its own hits counted as there.

        The watermark binds only while something runs, so whatever was accepted fits alone.
        """
        keep = self._watermark if view.running else 0
        needed = self._pool.blocks_for(self._batching.reserves(request)) - len(hits)
        return needed <= self._pool.available - self._pool.unheld(hits) - keep
