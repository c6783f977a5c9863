"""Tenants in metrics: the few that use most have series of their own, all others share one.

Owns who is named, and the sums; fold_requests.py charges it. Counters stay monotonic: a tenant
that becomes named begins at 0, and what it used before stays with the others. Must never grow with
the number of tenants: NAMED_MAX have series, TRACKED_MAX are weighed (space-saving: one that uses
more than 1 / TRACKED_MAX of all is never missed), and at most once in RERANK_NS names change.
"""

from telemetry.histogram import Values

NAMED_MAX = 20
TRACKED_MAX = 256
RERANK_NS = 60 * 10**9
LEAD = 2.0
SHARE_MIN = 0.02
"""One takes a named tenant's place if it uses so many times as much, and so much of all: series
should not flicker among tenants of whom none matters."""
OTHER = "other"
SUMS = ("requests", "prompt_tokens", "output_tokens", "device_seconds", "rejections")


class TenantFold:
    """Sums by tenant. Weights are tokens, halved at each ranking: the latest minutes count."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {OTHER: dict.fromkeys(SUMS, 0)}
        self._weights: dict[str, float] = {}
        self._ranked_at_ns = 0

    def charge(self, tenant: str, what: str, amount: float) -> None:
        """Add to one sum of a tenant."""
        if tenant not in self._sums and len(self._sums) <= NAMED_MAX:
            self._sums[tenant] = dict.fromkeys(SUMS, 0)
        self._sums.get(tenant, self._sums[OTHER])[what] += amount

    def weigh(self, tenant: str, tokens: int, at_ns: int) -> None:
        """Note how much a tenant used, at an instant; now and then this changes who is named."""
        weights = self._weights
        if tenant not in weights and len(weights) >= TRACKED_MAX:
            least = min(weights, key=weights.__getitem__)
            weights[tenant] = weights.pop(least)
        weights[tenant] = weights.get(tenant, 0.0) + tokens
        if at_ns - self._ranked_at_ns >= RERANK_NS:
            self._rank()
            self._ranked_at_ns = at_ns

    def _rank(self) -> None:
        weights = self._weights
        named = sorted(self._sums.keys() - {OTHER}, key=lambda one: weights.get(one, 0.0))
        unnamed = sorted(weights.keys() - self._sums.keys(), key=weights.__getitem__, reverse=True)
        least = SHARE_MIN * sum(weights.values())
        for leaving, joining in zip(named, unnamed, strict=False):
            if weights[joining] < max(least, LEAD * weights.get(leaving, 0.0)):
                break
            del self._sums[leaving]
            self._sums[joining] = dict.fromkeys(SUMS, 0)
        for tenant in weights:
            weights[tenant] /= 2

    def values(self) -> dict[str, Values]:
        """Return what the table names of tenants."""
        return {
            f"iterscope_tenant_{what}_total": {
                (tenant,): sums[what] for tenant, sums in self._sums.items()
            }
            for what in SUMS
        }
