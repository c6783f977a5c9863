"""METRICS, the one table of everything that Prometheus is told: names, types, labels, help, units.

Owns the table, put together from the parts metric_*.py; metrics.py fills in the values at each
scrape, and docs/metrics.md is made from it. A metric that is not here is not exported.
"""

from telemetry.metric_device import GPUS
from telemetry.metric_engine import KV, STATE, STEPS
from telemetry.metric_requests import CLIENTS, COUNTS, OBJECTIVES, TENANTS, TIMES
from telemetry.metric_telemetry import HISTORY, RECORDS
from telemetry.metric_vllm import VLLM

SECTIONS = (
    ("Engine and queue", STATE),
    ("Steps and batches", STEPS),
    ("KV cache", KV),
    ("Requests", COUNTS),
    ("Where time went", TIMES),
    ("Objectives", OBJECTIVES),
    ("Clients", CLIENTS),
    ("Tenants", TENANTS),
    ("The record", RECORDS),
    ("History", HISTORY),
    ("GPUs", GPUS),
    ("vLLM's names of another shape", VLLM),
)

METRICS = tuple(spec for _, specs in SECTIONS for spec in specs)
