"""Alerts of how it is served: queue, KV cache, preemption, fairness, shapes, host and slow readers.

Owns the group `scheduling`; alerts.py puts it beside the others. Each names a cause that an
operator can do something about; most are tickets, since the objectives' alerts page for the
effect. Must be silent on an idle engine, and where the figure is high but nobody waits for it.
"""

from grafana.alert_spec import Alert, Group

_QUEUE = (
    Alert(
        name="IterscopeQueueGrowing",
        severity="ticket",
        value="iterscope:unfinished:ratio10m",
        above=0.1,
        where=("iterscope:waiting:min5m >= 5",),
        for_s=300,
        shown="percent",
        summary="{value} of what arrived at {instance} in 10 minutes has not ended, and the queue "
        "is never empty: arrivals outrun completions.",
        query="why_waiting",
        fires_on="over 10 minutes 10% more arrive than end, while at least 5 always wait, for "
        "5 minutes",
        silent_on="a burst that is worked off; more that runs while nobody waits; a full queue "
        "that no longer grows (IterscopeRequestsRefused tells)",
    ),
    Alert(
        name="IterscopeStarvation",
        severity="ticket",
        value="iterscope_overtaken_wait_seconds",
        above=30,
        for_s=30,
        shown="duration",
        summary="A request on {instance} has waited {value} while later ones were admitted.",
        query="longest_waits",
        fires_on="a request that waits for more than 30 s and is overtaken",
        silent_on="a queue that is long for all alike",
    ),
    Alert(
        name="IterscopeKvPressure",
        severity="ticket",
        value="iterscope:kv_usage:mean5m",
        above=0.9,
        where=("iterscope:waiting_for_kv:mean5m > 0.5",),
        for_s=600,
        shown="percent",
        summary="{value} of the KV blocks of {instance} are held, and requests wait for more.",
        query="who_held_the_kv",
        fires_on="more than 90% of the blocks held on average and half a request waiting for "
        "blocks at any time, for 10 minutes",
        silent_on="a full cache that nobody waits for; cached blocks, which are free",
    ),
    Alert(
        name="IterscopePreemptionThrash",
        severity="ticket",
        value="iterscope:preempted_tokens:ratio5m",
        above=0.1,
        where=("iterscope:preemptions:increase5m > 2.5",),
        for_s=300,
        shown="percent",
        summary="{instance} throws away {value} of the tokens it computes, by preemption.",
        query="recompute_tax",
        fires_on="more than 10% of computed tokens lost, by 3 preemptions or more in 5 minutes, "
        "for 5 minutes",
        silent_on="a preemption now and then; many that lose little",
    ),
)

_STEP = (
    Alert(
        name="IterscopePaddingWaste",
        severity="ticket",
        value="iterscope:padding:ratio5m",
        above=0.25,
        where=("iterscope:busy:ratio5m > 0.1",),
        for_s=900,
        shown="percent",
        summary="{value} of the rows that {instance} computes are padding, or idle rows of a "
        "fixed batch.",
        query="batch_shapes",
        fires_on="more than 25% of rows computed for nobody for 15 minutes, by an engine that is "
        "busy a tenth of the time",
        silent_on="an engine that has next to nothing to do, whose batches are small",
    ),
    Alert(
        name="IterscopeGraphMisses",
        severity="ticket",
        value="iterscope:graph_misses:ratio5m",
        above=0.05,
        where=("iterscope:graph_hits:total > 0", "iterscope:busy:ratio5m > 0.1"),
        for_s=900,
        shown="percent",
        summary="{value} of the decode steps of {instance} find no captured graph and run eagerly.",
        query="batch_shapes",
        fires_on="more than 5% of decode steps miss for 15 minutes",
        silent_on="an engine without graphs; steps with prompts in them, which never replay one",
    ),
    Alert(
        name="IterscopeSchedulerCpu",
        severity="ticket",
        value="iterscope:host_time:ratio5m",
        above=0.2,
        where=("iterscope:busy:ratio5m > 0.5",),
        for_s=600,
        shown="percent",
        summary="Planning, committing and the gap between steps take {value} of the step on "
        "{instance}: the device waits for the host.",
        query="step_time",
        fires_on="more than 20% of the time of steps for 10 minutes, by an engine that is busy "
        "half of the time",
        silent_on="a mostly idle engine: nobody waits for it",
    ),
    Alert(
        name="IterscopeSlowClients",
        severity="ticket",
        value="iterscope:client_stall:ratio15m",
        above=0.1,
        where=("increase(iterscope_output_stalls_total[15m]) > 2.5",),
        for_s=300,
        shown="percent",
        summary="{value} of the time of requests on {instance} is spent on clients that do not "
        "read.",
        query="slowest_requests",
        fires_on="more than 10% of the life of requests spent on writes that wait for clients, of "
        "3 clients or more in 15 minutes",
        silent_on="one stuck client; streams that are read slowly but in time",
    ),
)

SCHEDULING = (
    Group(name="iterscope-queue", alerts=_QUEUE),
    Group(name="iterscope-step", alerts=_STEP),
)
