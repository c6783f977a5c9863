"""Tenants in metrics: the top are named, whoever comes first; series are few; counters never fall.

Owns the proofs of telemetry/fold_tenants.py, by the text of scrapes.
"""

import random
from collections import Counter, defaultdict

from telemetry.fold_tenants import NAMED_MAX, OTHER, RERANK_NS, TRACKED_MAX, TenantFold
from telemetry.records import RequestShare
from tests import samples
from tests.test_metrics import Scrape, metered

REQUESTS = "iterscope_tenant_requests_total"
TOKENS = "iterscope_tenant_output_tokens_total"


def series(scrape: Scrape, name: str) -> dict[str, float]:
    return {
        dict(pairs)["tenant"]: value for (own, pairs), value in scrape.values.items() if own == name
    }


def test_a_thousand_tenants_have_as_many_series_as_twenty() -> None:
    bus, metrics = metered(capacity=10_000)
    for request in range(1, 1001):
        tenant = f"tenant-{request}"
        bus.publish(samples.start(request, tenant=tenant))
        bus.publish(samples.end(request, tenant=tenant, output_tokens=3))
        bus.publish(samples.rejection(tenant=tenant))
        bus.publish(RequestShare(request=request, device_ns=10**9, kv_block_ns=1, rule="fitted"))
    scrape = Scrape(metrics)
    for what, each in (
        ("requests", 1),
        ("prompt_tokens", 8),
        ("output_tokens", 3),
        ("device_seconds", 1),
        ("rejections", 1),
    ):
        found = series(scrape, f"iterscope_tenant_{what}_total")
        assert len(found) == NAMED_MAX + 1
        assert sum(found.values()) == 1000 * each
        assert found[OTHER] == (1000 - NAMED_MAX) * each


def test_the_greatest_are_named_although_they_come_late() -> None:
    """A hundred small tenants come first; five great ones come after and take names.

    Each series that is there twice has not fallen, `other` never falls, and what all series gained,
    one that begins anew from 0, is what was used.
    """
    bus, metrics = metered(capacity=10_000)
    pick, used = random.Random(7), Counter[str]()
    before: dict[str, float] = {}
    gained: defaultdict[str, float] = defaultdict(float)
    names: set[str] = set()
    for request in range(1, 3001):
        great = request > 600 and pick.random() < 0.5
        tenant = f"great-{pick.randrange(5)}" if great else f"small-{pick.randrange(100)}"
        tokens = 40 if great else 2
        used[tenant] += tokens
        at_ns = request * RERANK_NS // 200
        bus.publish(samples.end(request, tenant=tenant, output_tokens=tokens, released_at_ns=at_ns))
        if request % 50 == 0:
            now = series(Scrape(metrics), TOKENS)
            assert len(now) <= NAMED_MAX + 1
            assert now[OTHER] >= before.get(OTHER, 0)
            for name, value in now.items():
                fell = value < before.get(name, 0)
                assert not fell, "a name that stayed lost some"
                gained[name] += value - before.get(name, 0)
            names |= now.keys()
            before = now
    assert {f"great-{number}" for number in range(5)} <= before.keys()
    # What one used between a scrape and the loss of its name is in no scrape.
    assert 0.99 * sum(used.values()) < sum(gained.values()) <= sum(used.values())
    for number in range(5):
        assert gained[f"great-{number}"] > 0.8 * used[f"great-{number}"]
    assert len(names) < NAMED_MAX + 20, "names should not flicker"


def test_weights_are_bounded_and_a_great_one_is_found_among_ten_thousand() -> None:
    fold = TenantFold()
    for number in range(10_000):
        fold.weigh(f"small-{number}", 10, at_ns=number)
        if number % 20 == 0:
            fold.weigh("great", 100, at_ns=number)
        fold.charge(f"small-{number}", "requests", 1)
    assert len(fold._weights) == TRACKED_MAX
    fold.weigh("great", 100, at_ns=RERANK_NS + 1)
    assert ("great",) in fold.values()[REQUESTS]


def test_a_tenant_that_is_called_other_is_among_the_others() -> None:
    bus, metrics = metered()
    for request, tenant in enumerate((OTHER, "a", OTHER), 1):
        bus.publish(samples.end(request, tenant=tenant))
    assert series(Scrape(metrics), REQUESTS) == {OTHER: 2, "a": 1}
