"""What each cause means, in words, and why the two rules divide time as they do.

Owns the sentences that SCHEMA.md, the terminal and the page show; the closed list itself is in
records.py and the arithmetic in explain.py. Imports nothing but the standard library and records.
Must never promise what the rules do not do: a change there is a change here.
"""

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "tokenize": "from receipt until the prompt was tokens and handed to the engine",
        "step_boundary": "until the first step that could hold it began",
        "queue_batch_closed": "waiting: the fixed batch takes nobody while it runs or forms",
        "queue_seqs": "waiting: as many sequences ran as may",
        "queue_budget": "waiting: the step's tokens were spent",
        "queue_prefill_cap": "waiting: as many prompts were under way in part as may",
        "queue_dependency": "waiting: what it depends on was not ready",
        "queue_slo": "waiting: its prefill would have broken others' objectives",
        "queue_kv": "waiting: its KV blocks were not free",
        "queue_policy": "waiting: its tenant's quota was reached",
        "own_prefill": "computing its own prompt",
        "own_decode": "computing its own output",
        "neighbour_prefill": "its steps took longer for others' prompts",
        "neighbour_decode": "its steps took longer for others' decodes",
        "recompute": "computing again what a preemption had thrown away",
        "preempted_kv": "out of the batch: its blocks were needed by another",
        "preempted_policy": "out of the batch: the policy let another go first",
        "passed_over": "its turn had come, and a step gave it nothing",
        "batch_held": "its answer was complete and the fixed batch was not",
        "scheduler": "its steps' host time: planning, launching, taking results in",
        "padding": "its steps took longer for padding and for idle rows",
        "output": "from the engine's end to the last write",
        "client_stall": "writes that waited for the client, after the engine's end",
        "unexplained": "no record tells: iterations or the server's own stamps were lost",
    }
)

RULES = """\
A request's life, from receipt to its last write, is divided into causes that sum to it exactly.
Time before the engine is the server's own stamps. In the engine each iteration's tile gives every
live request one cause, the first that holds: preempted, passed over, waiting, held by a fixed
batch, scheduled. A waiting request waits for the check that ended that step's admission, behind
the first request it refused. After the engine come output and what the client kept waiting.

- A scheduled tile less its device time is `scheduler`: the device did nothing for anybody then.
- The rest, T, is divided by the step model in force. A request's *own* part is what its tokens
alone would have taken by the model, the fixed cost included, at most T: alone it would have paid
that in full. What is left is the doing of the others, in proportion to what the model says each
added; padding and idle rows count as decodes. So noise above the model is charged to neighbours:
the model's error stands beside the figure. Without neighbours and padding all of T is its own.
- Before the first fit nothing is known of costs: T goes by tokens alone, and `rule` is `counted`
where any row was divided so.
- A row of several tokens weighs as a prefill whatever its tokens are, since that is how it is
computed; whether its owner sees `own_prefill`, `own_decode` or `recompute` goes by position.
- Where the model gives neighbours no cost at all although they are there, their tokens weigh.
- A life ends with its last write if it got all it asked for (a stop string ends an answer before
the engine hears of it), else when its blocks were free, if that was later.
- Stalls of the client before the engine's end overlap tiles: `delivery.stall_ns` shows them, and
only the part that fits behind the engine's end is added as `client_stall`.
- What was lost between engine and history is `unexplained`. After a loss nothing is assumed: time
in which a request may have run is given back to `unexplained` once the records show that it did.
- Requests that were lost with their server have no causes on record, since nobody knows when they
were received or written; `iterscope explain` divides what iterations tell of them.

*Shares* answer another question, who pays: a step's device time in proportion to marginal cost,
the fixed cost in equal parts, because everybody in the batch needed the step. They sum to the
device time, which explanations do not: two requests in one step both waited for all of it.
`kv_block_ns` is blocks held times time."""


def cause_table() -> str:
    """Return the closed list with its meanings as a Markdown table."""
    lines = ["| cause | where the time went |", "|---|---|"]
    lines += [f"| `{cause}` | {meaning} |" for cause, meaning in MEANINGS.items()]
    return "\n".join(lines)
