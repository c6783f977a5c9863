"""Clients that give up and come again, at three times what is possible (vllm#2901).

A slow machine must not decide: a client's patience is measured in what the engine makes, not in
seconds. Compared in one run are a queue as long as the clients' patience and one without an end,
where first come first served computes for those who are about to leave.
"""

import asyncio
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.api import ids, in_flight
from tests.servers import Server, serving

SLOTS, TOKENS = 8, 60
CLIENTS, TRIES = 3 * SLOTS, 3
BODY = {"prompt": ids(8), "max_tokens": TOKENS, "ignore_eos": True}
BATCH_TOKENS = SLOTS * TOKENS
PATIENCE_TOKENS = 2.5 * BATCH_TOKENS
"""Two batches fit into a client's patience, and three do not."""
LOAD_TOKENS = 40 * BATCH_TOKENS
GENERATED = "vllm:generation_tokens_total"


class Crowd:
    """So many clients, each with a request under way or on its way back, until the load is over."""

    def __init__(self, server: Server) -> None:
        self.got = self.gave_up = self.refused = 0
        self._server = server
        self._made_tokens = server.metric(GENERATED)
        self._until_tokens = self._made_tokens + LOAD_TOKENS

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._server.url, limits=limits, timeout=60) as made:
            clock = asyncio.create_task(self._tick())
            await asyncio.gather(*(self._client(made) for _ in range(CLIENTS)))
            await clock

    def _over(self) -> bool:
        return self._made_tokens >= self._until_tokens

    async def _tick(self) -> None:
        while not self._over():
            self._made_tokens = await asyncio.to_thread(self._server.metric, GENERATED)

    async def _client(self, made: httpx.AsyncClient) -> None:
        while not self._over():
            for _ in range(TRIES):
                if self._over() or await self._answered(made):
                    break

    async def _answered(self, made: httpx.AsyncClient) -> bool:
        """Ask once; whoever is refused comes back when told, whoever gives up breaks off."""
        until_tokens = self._made_tokens + PATIENCE_TOKENS
        asked = asyncio.create_task(made.post("/v1/completions", json=BODY))
        while not asked.done() and self._made_tokens < until_tokens and not self._over():
            await asyncio.wait([asked], timeout=0.01)
        if not asked.done() and not self._over():
            asked.cancel()
            await asyncio.wait([asked])
            self.gave_up += 1
            return False
        answer = await asked
        if answer.status_code == 429:
            self.refused += 1
            await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1000)
            return False
        self.got += answer.json()["usage"]["completion_tokens"]
        return True


def useful_share(folder: Path, *flags: str) -> tuple[float, Crowd]:
    """Return what clients got of all that a fresh engine made for a crowd, and the crowd."""
    seqs = ("--max-num-seqs", str(SLOTS))
    with serving(folder, tiny.write(folder / "model"), *seqs, *flags) as server:
        before = server.metric(GENERATED)
        crowd = Crowd(server)
        asyncio.run(crowd.run())
        began = time.monotonic()
        server.wait(lambda: not in_flight(server))
        server.wait_idle(5)
        assert time.monotonic() - began < 5, "what nobody waits for is not computed"
        return crowd.got / (server.metric(GENERATED) - before), crowd


@pytest.mark.soak
def test_a_queue_as_long_as_patience_keeps_the_engine_useful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounded, few = useful_share(tmp_path, "--max-queue-requests", str(SLOTS))
    endless, many = useful_share(tmp_path, "--max-queue-requests", "1024")
    with capsys.disabled():
        for name, share, crowd in (("bounded", bounded, few), ("endless", endless, many)):
            told = f"refused {crowd.refused}, gave up {crowd.gave_up}"
            sys.stdout.write(f"\n{name}: {share:.2f} of the tokens were of use; {told}\n")
    assert few.refused
    assert many.gave_up
    assert bounded >= 0.9
    assert endless <= bounded
