"""The explainer: the thread that folds every request's causes, and its word to the event loop.

Owns the fold and the one way of its records to the bus: published on the event loop, since nobody
else may. server/life.py starts and stops it, server/streaming.py asks it for receipts. Runs off
the engine's path, a few times a second; must never make a request wait for more than its receipt.
"""

import asyncio
import logging
import threading
import traceback
from collections.abc import Sequence

from server.clock import Clock
from server.sequence import Sequence as LiveSequence
from telemetry.bus import Bus
from telemetry.explain_fold import CauseFold
from telemetry.explain_life import Settled
from telemetry.records import Delivery, Fault, Record

PERIOD_S = 0.5
RECEIPT_S = 2.0
"""How long an answer waits for its receipt: a step or two, unless the engine is gone."""


class Explainer:
    """The fold of causes with its thread."""

    def __init__(self, *, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._fold = CauseFold(bus)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._live, name="explainer", daemon=True)
        self._log = logging.getLogger("iterscope.explain")

    def start(self) -> None:
        """Begin to fold in the background; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Tell what is still to tell, and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._publish(self._advance())
        self._fold.close()

    async def settled(self, asked: Sequence[tuple[LiveSequence, Delivery]]) -> list[Settled] | None:
        """Return these sequences divided as far as written; None when it takes too long."""
        try:
            async with asyncio.timeout(RECEIPT_S):
                for sequence, _ in asked:
                    await sequence.ended.wait()
        except TimeoutError:
            return None
        settled, told = await asyncio.to_thread(self._settled, asked)
        self._publish(told)
        return settled

    def _settled(
        self, asked: Sequence[tuple[LiveSequence, Delivery]]
    ) -> tuple[list[Settled] | None, list[Record]]:
        told = self._advance()
        with self._lock:
            found = [self._fold.settled(one.request, delivery) for one, delivery in asked]
        settled = [one for one in found if one is not None]
        return (settled if len(settled) == len(found) else None), told

    def _live(self) -> None:
        loop = self._loop
        assert loop is not None
        while not self._stopping.wait(PERIOD_S):
            told = self._advance()
            if told:
                loop.call_soon_threadsafe(self._publish, told)

    def _advance(self) -> list[Record]:
        """Fold what was published since; a mistake of ours becomes a Fault, and folding goes on."""
        try:
            with self._lock:
                return self._fold.advance()
        except Exception as error:  # noqa: BLE001  the top of a thread: it becomes a Fault
            self._log.exception("a record could not be folded")
            return [
                Fault(
                    fault_at_ns=self._clock.now_ns(),
                    step=None,
                    where="explainer",
                    error=f"{type(error).__name__}: {error}".splitlines()[0],
                    traceback="".join(traceback.format_tb(error.__traceback__)),
                )
            ]

    def _publish(self, records: Sequence[Record]) -> None:
        for record in records:
            self._bus.publish(record)
