"""One HTTP request's sequences, from submission to their deliveries on record; and all of them.

Owns Job (what to generate), Generation (its live choices) and Generations (the requests in
flight, one writer: the event loop). server/openai_api.py starts one, server/streaming.py answers
with it. Whatever happens, each sequence is aborted or finished and its Delivery published once.
"""

import asyncio
import logging
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.messages import SamplingParams
from server.answers import Style, Usage
from server.choice import Choice
from server.clock import Clock
from server.echo import Echo
from server.engine_client import EngineClient
from server.errors import ApiError, overdue
from server.explainer import Explainer
from server.log import facts
from server.prompts import TOKENS_SHOWN, Prompts
from server.receipt import receipt_of
from server.sequence import Sequence, Submission
from server.tokenizer import Tokenizer
from telemetry.bus import Bus
from telemetry.records import CancelCause, Delivery, Fault

SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: seeds of one request's choices lie far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for, checked: n choices of each prompt.

    `sampling` carries the seed of each prompt's first choice; `max_tokens` has one entry a prompt,
    and so has `echo` where prompts are to be shown: how many leading tokens have no text. `alone`
    shows nothing else. With `receipt` the answer says what it cost.
    """

    style: Style
    external_id: str | None
    tenant: str
    prompts: list[list[int]]
    n: int
    max_tokens: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    priority: int
    slo: str | None
    cache_salt: str
    stream: bool
    received_at_ns: int
    tokenized_at_ns: int
    echo: list[int] | None = None
    alone: bool = False
    receipt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every generation needs of the server; queue_deadline_s None lets requests wait.

    `prompts` is None unless prompts may be shown.
    """

    queue_deadline_s: float | None
    prompts: Prompts | None = None
    engine: EngineClient
    tokenizer: Tokenizer
    bus: Bus
    clock: Clock
    explainer: Explainer
    eos_ids: frozenset[int]


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a prompt: the first one has the request's own."""
    mixed = (seed + SEED_STEP * index) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


class Generation:
    """The choices of one HTTP request while it is in flight."""

    def __init__(self, parts: Parts, job: Job) -> None:
        self.job = job
        self.failure: ApiError | None = None
        self.choices: list[Choice] = []
        self.deadline: asyncio.TimerHandle | None = None
        self._parts = parts
        self._cause: CancelCause | None = None
        self._work: asyncio.Task[None] | None = None
        self._submitted_at_ns = 0
        self._closed = False
        self._log = logging.getLogger("iterscope.request")

    @property
    def id(self) -> str:
        """Return the request's own id, which the answer carries."""
        return self.job.style.id

    def submit(self) -> None:
        """Hand every sequence to the engine, all or none.

        Raises EngineDown, or QueueFull when they are too many for the queue.
        """
        job = self.job
        self._parts.engine.check_queue(
            sequences=len(job.prompts) * job.n,
            tokens=sum(map(len, job.prompts)) * job.n,
            tenant=job.tenant,
        )
        self._submitted_at_ns = self._parts.clock.now_ns()
        silent = frozenset(job.sampling.stop_token_ids)
        if not job.sampling.ignore_eos:
            silent |= self._parts.eos_ids
        several = len(job.prompts) * job.n > 1
        for place, (prompt, limit) in enumerate(zip(job.prompts, job.max_tokens, strict=True)):
            for number in range(job.n):
                index = len(self.choices)
                seed = choice_seed(job.sampling.seed, number)
                submission = Submission(
                    request_id=f"{self.id}-{index}" if several else self.id,
                    external_id=job.external_id,
                    tenant=job.tenant,
                    parent_id=self.id if several else None,
                    prompt=prompt,
                    max_tokens=limit,
                    sampling=msgspec.structs.replace(job.sampling, seed=seed),
                    priority=job.priority,
                    slo=job.slo,
                    cache_salt=job.cache_salt,
                    stream=job.stream,
                    received_at_ns=job.received_at_ns,
                )
                sequence = self._parts.engine.submit(submission)
                if self._parts.prompts is not None:
                    self._parts.prompts.keep(submission.request_id, prompt)
                self.choices.append(
                    Choice(
                        index,
                        sequence,
                        self._parts.tokenizer.detokenizer(),
                        stops=job.stops,
                        silent=silent,
                        echo=self._echo(place),
                    )
                )

    def _echo(self, place: int) -> Echo | None:
        """Return the echo of the prompt at this place, if prompts are to be shown."""
        job = self.job
        if job.echo is None:
            return None
        return Echo(
            job.prompts[place],
            self._parts.tokenizer.detokenizer(special=True),
            hidden=job.echo[place],
            scored=job.sampling.prompt_logprobs is not None,
            alone=job.alone,
        )

    def usage(self) -> Usage:
        """Return the tokens of the whole request so far."""
        return Usage(
            prompt_tokens=sum(map(len, self.job.prompts)),
            completion_tokens=sum(choice.output_tokens for choice in self.choices),
            cached_tokens=sum(
                choice.sequence.cached_tokens for choice in self.choices[:: self.job.n]
            ),
        )

    def stop(self, choice: Choice) -> None:
        """Tell the engine that a stop string ended this choice."""
        self._parts.engine.abort(
            choice.sequence, finish="stop", delivered_tokens=choice.released_tokens
        )

    def give_up(self, error: str) -> None:
        """End what is still open as failed; `error` goes on record."""
        for choice in self._open():
            choice.finish_reason = "error"
            self._parts.engine.abort(
                choice.sequence,
                finish="error",
                error=error,
                delivered_tokens=choice.delivered_tokens,
            )

    def fault(self, error: BaseException) -> None:
        """End everything because of our own mistake, and put it on record."""
        trace = "".join(traceback.format_tb(error.__traceback__))
        # Its own words might quote a prompt: where and of which kind it was must do.
        self._log.error("request %s broke: %s\n%s", self.id, type(error).__name__, trace)
        self.give_up("the server could not answer")
        self._parts.bus.publish(
            Fault(
                fault_at_ns=self._parts.clock.now_ns(),
                step=None,
                where="server",
                error=type(error).__name__,
                traceback=trace,
            )
        )

    def began(self, work: "asyncio.Task[None]") -> None:
        """Name the task that answers, so that `cancel` can end it."""
        self._work = work

    def cancel(self, cause: CancelCause, failure: ApiError) -> None:
        """End the request early; its client is told `failure`. Does nothing a second time."""
        if self._closed or self.failure is not None:
            return
        self.failure = failure
        self.abandon(cause)
        if self._work is not None:
            self._work.cancel()

    def abandon(self, cause: CancelCause) -> None:
        """Abort every sequence that has not finished; the first cause counts."""
        for choice in self._open():
            self._cause = self._cause or cause
            choice.finish_reason = "cancelled"
            self._parts.engine.abort(
                choice.sequence,
                finish="cancelled",
                cancel_cause=cause,
                delivered_tokens=choice.delivered_tokens,
            )

    def stalled_ns(self) -> int:
        """Return how long the oldest write under way has waited for the client."""
        since = [c.writing_since_ns for c in self.choices if c.writing_since_ns]
        return self._parts.clock.now_ns() - min(since) if since else 0

    def close(self) -> None:
        """Publish the deliveries and the log line; whatever is still open is abandoned."""
        if self._closed:
            return
        self._closed = True
        self.abandon("client")
        for _, delivery in self.deliveries():
            self._parts.bus.publish(delivery)
        if self._parts.prompts is not None:
            self._tell_prompts(self._parts.prompts)
        self._log.info("%s", facts(self._ended()))

    def deliveries(self) -> list[tuple[Sequence, Delivery]]:
        """Return the server's record of each sequence as it stands now."""
        return [
            (
                choice.sequence,
                choice.delivery(
                    tokenized_at_ns=self.job.tokenized_at_ns,
                    submitted_at_ns=self._submitted_at_ns,
                ),
            )
            for choice in self.choices
        ]

    async def receipt(self) -> dict[str, Any] | None:
        """Return what the answer's receipt says, None when it was not asked for.

        Waits for the engine's own end of each sequence; a receipt that takes too long is empty.
        """
        if not self.job.receipt:
            return None
        settled = await self._parts.explainer.settled(self.deliveries())
        return receipt_of(settled) if settled else {}

    def _tell_prompts(self, prompts: Prompts) -> None:
        """Write the prompts into the log, as JSON so that they can forge no line of it."""
        for prompt in self.job.prompts:
            more = len(prompt) - TOKENS_SHOWN
            shown = msgspec.json.encode(prompts.text(prompt)).decode()
            shown += f" and {more} tokens" * (more > 0)
            self._log.info("prompt of %s: %s", self.id, shown)

    def _open(self) -> Iterable[Choice]:
        return [choice for choice in self.choices if choice.finish_reason is None]

    def _ended(self) -> dict[str, object]:
        job = self.job
        first = [c.first_write_at_ns for c in self.choices if c.first_write_at_ns is not None]
        now = self._parts.clock.now_ns()

        def ms(begin_ns: int, end_ns: int) -> str:
            return f"{(end_ns - begin_ns) / 1e6:.1f}"

        usage = self.usage()
        return {
            "request": self.id,
            "external": job.external_id,
            "finish": ",".join(sorted({choice.finish_reason or "?" for choice in self.choices})),
            "cause": self._cause,
            "sequences": len(self.choices),
            "prompt": usage.prompt_tokens,
            "output": usage.completion_tokens,
            "stream": job.stream,
            "tokenize_ms": ms(job.received_at_ns, job.tokenized_at_ns),
            "ttft_ms": ms(job.received_at_ns, min(first)) if first else None,
            "total_ms": ms(job.received_at_ns, now),
        }


class Generations:
    """The HTTP requests in flight, by id; bounded by the connections that wait for them."""

    def __init__(self, parts: Parts) -> None:
        self.admitting = True
        self.parts = parts
        self._live: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, job: Job) -> Generation:
        """Submit a job; raises EngineDown or QueueFull. The caller must see to `finish`."""
        generation = Generation(self.parts, job)
        generation.submit()
        self._live[generation.id] = generation
        self._idle.clear()
        if self.parts.queue_deadline_s is not None:
            loop = asyncio.get_running_loop()
            generation.deadline = loop.call_later(
                self.parts.queue_deadline_s, self._expire, generation
            )
        return generation

    def _expire(self, generation: Generation) -> None:
        """Cancel a request of which a sequence still waits for its admission."""
        queue = self.parts.engine.queue
        if any(queue.holds(choice.sequence.request) for choice in generation.choices):
            retry_after_s = queue.retry_after_s(len(generation.choices))
            message = f"it waited {self.parts.queue_deadline_s:g} s to be admitted"
            generation.cancel("deadline", overdue(message, retry_after_s=retry_after_s))

    def finish(self, generation: Generation) -> None:
        """Close a generation and forget it; harmless a second time."""
        generation.close()
        if generation.deadline is not None:
            generation.deadline.cancel()  # it would keep the prompt until a distant deadline
        self._live.pop(generation.id, None)
        if not self._live:
            self._idle.set()

    def find(self, request_id: str) -> Generation | None:
        """Return the generation of this id, or the one that a sequence of this id belongs to."""
        found = self._live.get(request_id) or self._live.get(request_id.rpartition("-")[0])
        if found is None or request_id == found.id:
            return found
        known = {choice.sequence.request_id for choice in found.choices}
        return found if request_id in known else None

    def live(self) -> list[Generation]:
        """Return the generations in flight, oldest first."""
        return list(self._live.values())

    def cancel_all(self, cause: CancelCause, failure: ApiError) -> None:
        """Cancel whatever is in flight."""
        for generation in self.live():
            generation.cancel(cause, failure)

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        await self._idle.wait()
