"""The answer to a generation on the wire: in one piece, or as a stream of events.

Owns the writing, and the watch over the client while the work goes on: one that left or reads
nothing has its sequences aborted at once. server/openai_api.py returns it as a response. Must
never write a comment line, and never a part of an error after the end of a stream.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answers import ChunkWriter, Finished, Usage, closing, whole
from server.choice import Choice, Piece
from server.errors import ApiError, engine_down
from server.generation import Generation, Generations
from server.logprobs import Scored, shown_in_chat, shown_in_completion
from telemetry.records import CancelCause

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class GenerationResponse(Response):
    """Answers with the tokens of one generation, and finishes it whatever happens."""

    def __init__(
        self,
        generations: Generations,
        generation: Generation,
        *,
        headers: dict[str, str],
        client_stall_s: float,
    ) -> None:
        super().__init__(headers=headers)
        self._generations = generations
        self._generation = generation
        self._clock = generations.parts.clock
        self._client_stall_s = client_stall_s
        self._own_headers = headers
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer, or stop when the client is gone."""
        assert scope["type"] == "http"
        generation = self._generation
        answer = self._stream if generation.job.stream else self._whole
        work = asyncio.create_task(answer(send))
        watch = asyncio.create_task(self._watch(receive))
        generation.began(work)
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                generation.abandon(watch.result())
            elif generation.failure is not None:
                await self._fail(send, generation.failure)
            elif not work.cancelled() and (error := work.exception()):
                await self._broke(send, error)
        finally:
            work.cancel()
            watch.cancel()
            self._generations.finish(generation)
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _watch(self, receive: Receive) -> CancelCause:
        """Return why the client no longer counts: it left, or it reads nothing."""
        while True:
            try:
                async with asyncio.timeout(self._client_stall_s / 4):
                    message = await receive()
            except TimeoutError:
                if self._generation.stalled_ns() > self._client_stall_s * 1e9:
                    return "stall"
                continue
            if message["type"] == "http.disconnect":
                return "client"

    # ---- a stream

    async def _stream(self, send: Send) -> None:
        await self._start(send, 200, STREAM_HEADERS)
        choices = self._generation.choices
        if len(choices) == 1:
            await self._stream_choice(send, choices[0])
        else:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._stream_choice(send, choice))
        receipt = await self._generation.receipt()
        end = closing(self._generation.job.style, self._generation.usage(), receipt)
        await self._write(send, choices[0], end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream_choice(self, send: Send, choice: Choice) -> None:
        prompt = choice.sequence.submission.prompt
        style = self._generation.job.style
        writer = ChunkWriter(style, choice.index, prompt)
        while choice.finish_reason is None:
            piece = await self._take(choice)
            usage = self._usage_of(choice) if style.continuous_usage else None
            logprobs = self._shown(piece.scores) if piece.scores else None
            chunk = writer.text(piece.text, piece.tokens, usage, logprobs)
            if choice.finish_reason is not None:
                chunk += writer.finish(choice.finish_reason, usage)
            if chunk:
                await self._write(send, choice, chunk)

    @staticmethod
    def _usage_of(choice: Choice) -> Usage:
        """Return the tokens of one choice so far."""
        return Usage(
            prompt_tokens=len(choice.sequence.submission.prompt),
            completion_tokens=choice.output_tokens,
            cached_tokens=choice.sequence.cached_tokens,
        )

    async def _write(self, send: Send, choice: Choice, chunk: bytes) -> None:
        began = choice.writing_since_ns = self._clock.now_ns()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        choice.writing_since_ns = 0
        choice.wrote(len(chunk), began, self._clock.now_ns())

    # ---- one piece

    async def _whole(self, send: Send) -> None:
        generation = self._generation
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._collect(choice)) for choice in generation.choices]
        finished = [task.result() for task in tasks]
        receipt = await generation.receipt()
        body = whole(generation.job.style, finished, generation.usage(), receipt)
        await self._send_body(send, 200, {"content-type": "application/json"}, body)

    async def _collect(self, choice: Choice) -> Finished:
        texts: list[str] = []
        tokens: list[int] = []
        scores: list[Scored] = []
        while choice.finish_reason is None:
            piece = await self._take(choice)
            texts.append(piece.text)
            tokens += piece.tokens
            scores += piece.scores
        scored = self._generation.job.sampling.logprobs is not None
        return Finished(
            index=choice.index,
            text="".join(texts),
            finish_reason=choice.finish_reason,
            prompt=choice.sequence.submission.prompt,
            tokens=tokens,
            logprobs=self._shown(scores) if scored else None,
        )

    # ---- both

    def _shown(self, scores: Sequence[Scored]) -> dict[str, Any]:
        chat = self._generation.job.style.endpoint == "chat"
        shown = shown_in_chat if chat else shown_in_completion
        return shown(scores, self._generations.parts.tokenizer)

    async def _take(self, choice: Choice) -> Piece:
        """Return the next of a choice; raises ApiError when the engine gave it up."""
        delta = await choice.sequence.take()
        piece = choice.add(delta)
        if choice.finish_reason == "stop" and delta.finish is None:
            self._generation.stop(choice)
        if choice.finish_reason in ("error", "cancelled"):
            raise self._given_up(choice)
        return piece

    def _given_up(self, choice: Choice) -> ApiError:
        if choice.finish_reason == "cancelled":
            return engine_down("the server is shutting down", retry_after_s=5)
        message = choice.error or "the engine could not go on"
        if self._generations.parts.engine.state != "ready":
            return engine_down(message, retry_after_s=2)
        return ApiError(500, message, code="engine_error")

    async def _start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        self._started = True
        lines = self._own_headers | headers
        raw = [(name.encode(), value.encode()) for name, value in lines.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_body(
        self, send: Send, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        length = {"content-length": str(len(body))}
        choices = self._generation.choices
        began = self._clock.now_ns()
        for choice in choices:
            choice.writing_since_ns = began
        await self._start(send, status, headers | length)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        now = self._clock.now_ns()
        for choice in choices:
            choice.writing_since_ns = 0
            choice.wrote(len(body) if choice is choices[0] else 0, began, now)

    async def _broke(self, send: Send, error: BaseException) -> None:
        """Tell the client what ended the work: the engine's reason, or our own mistake."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ApiError):
            self._generation.give_up(error.message)
        else:
            self._generation.fault(error)
            error = ApiError(500, "the server could not answer", code="internal_error")
        await self._fail(send, error)

    async def _fail(self, send: Send, failure: ApiError) -> None:
        """Write an error: as the answer if none was begun, else as the stream's last event."""
        try:
            async with asyncio.timeout(self._client_stall_s):
                if not self._started:
                    headers = {"content-type": "application/json", **failure.headers}
                    await self._start(send, failure.status, headers)
                    await send({"type": "http.response.body", "body": failure.body()})
                elif self._generation.job.stream:
                    event = b"data: " + failure.body() + b"\n\n"
                    await send({"type": "http.response.body", "body": event})
        except TimeoutError:
            return
