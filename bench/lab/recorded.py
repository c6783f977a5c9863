"""Our own record as a trace: what a server lived through, to be lived through again.

Owns the questions to a history's folder or a `.iterscope` recording, and what is made of the
answers: instants, lengths, tenants, priorities, objectives, who left and when. The record holds no
prompt, so prompts are made up at their lengths, with the cached part of each shared. Must never
write to what it reads.
"""

from pathlib import Path
from typing import Any

import msgspec

from bench.lab.traces import Row, Trace
from bench.lab.workload import Slo, WorkloadError
from telemetry.answer import Answer, QueryError
from telemetry.notes import read_server_file
from telemetry.objective import Objective
from telemetry.sandbox import Sandbox, SandboxFailed
from telemetry.wire import OpenFile, OpenFolder, question

ROWS_MAX = 100_000
DEADLINE_S = 60.0
REQUESTS = """
SELECT e.received_at_ns / 1e9 AS at_s, e.prompt_tokens, e.output_tokens, s.max_tokens,
       e.cached_tokens, e.tenant, s.priority, s.slo,
       CASE WHEN e.cancel_cause = 'client'
            THEN (e.cancel_requested_at_ns - e.received_at_ns) / 1e9 END AS leaves_after_s
FROM request_end e JOIN request_start s USING (run_id, request)
WHERE s.parent_id IS NULL
  AND run_id = (SELECT run_id FROM request_end GROUP BY run_id ORDER BY count(*) DESC, run_id
                LIMIT 1)
ORDER BY e.received_at_ns, e.request"""


class RecordReader:
    """A history's folder or a recorded file, open for questions; raises WorkloadError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sandbox = Sandbox()
        place = str(path.resolve())
        try:
            self._sandbox.open(OpenFolder(path=place) if path.is_dir() else OpenFile(path=place))
        except SandboxFailed as error:
            self._sandbox.close()
            server = read_server_file(path) if path.is_dir() else None
            told = f"{server.url} writes it; `iterscope record` copies it" if server else error
            raise WorkloadError(f"{path}: {told}") from error

    def ask(self, sql: str, parameters: list[object]) -> Answer:
        """Return the answer to one SELECT."""
        try:
            asked = question(
                sql, parameters, format="json", rows_max=ROWS_MAX, deadline_s=DEADLINE_S
            )
            return msgspec.json.decode(self._sandbox.ask(asked).content, type=Answer)
        except (SandboxFailed, QueryError) as error:
            raise WorkloadError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """End the process that reads."""
        self._sandbox.close()


def recorded(path: Path) -> Trace:
    """Return the requests of the run with the most of them; raises WorkloadError without any."""
    if not path.exists():
        raise WorkloadError(f"there is no record at {path}")
    reader = RecordReader(path)
    try:
        rows = [_row(*values) for values in reader.ask(REQUESTS, []).rows]
    finally:
        reader.close()
    if len(rows) < 2:
        raise WorkloadError(f"{path} holds {len(rows)} requests that ended: too few to replay")
    return Trace(f"recorded: {path.name}", "own", rows)


def _row(*values: Any) -> Row:
    at_s, prompt, output, wanted, cached, tenant, priority, slo, leaves_after_s = values
    return Row(
        at_s=at_s,
        prompt_tokens=prompt,
        # Who left would have been given more: its answer is as long as it might have become.
        output_tokens=max(1, output if leaves_after_s is None else wanted),
        shared_tokens=cached,
        tenant=tenant,
        priority=priority,
        slo=_slo(slo),
        leaves_after_s=leaves_after_s,
    )


def _slo(text: str | None) -> Slo | None:
    if text is None:
        return None
    try:
        asked = msgspec.json.decode(text, type=Objective)
    except msgspec.DecodeError:
        return None
    if asked.ttft_ms is None or asked.tpot_ms is None:
        return None
    return Slo(asked.ttft_ms, asked.tpot_ms)
