"""One request of a load on a bare socket: what is sent, and every read with its instant.

Owns the bytes of a request, the protocol that stamps reads, and what is read out of them after the
load is over: while it runs nothing is parsed, so that a generator costs little and stamps at once.
bench/lab/generator.py opens one a request. Must never judge an answer.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.lab.workload import Ask

READ_BYTES_MAX = 64 * 2**20
"""Of one answer: a server that sends more is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and what every request to it carries."""

    host: str
    port: int
    path: str
    secure: ssl.SSLContext | None
    model: str
    name: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def target_of(
    url: str, *, model: str, name: str, api_key: str | None, extra: dict[str, Any]
) -> Target:
    """Return the server at `url`, with or without /v1; raises ValueError for no such address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url: {url} is not like http://127.0.0.1:8000")
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    return Target(
        host=parts.hostname,
        port=parts.port or (443 if secure else 80),
        path=parts.path.rstrip("/").removesuffix("/v1"),
        secure=secure,
        model=model,
        name=name,
        api_key=api_key,
        extra=extra,
    )


def request_bytes(target: Target, number: int, ask: Ask) -> bytes:
    """Return a whole HTTP request: a streamed, greedy completion."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.priority is not None:
        body["priority"] = ask.priority
    if ask.slo is not None:
        body["slo"] = {"ttft_ms": ask.slo.ttft_ms, "tpot_ms": ask.slo.tpot_ms}
    content = msgspec.json.encode(body | target.extra)
    lines = [
        f"POST {target.path}/v1/completions HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
        f"X-Request-Id: {target.name}-{number}",
    ]
    if ask.tenant is not None:
        lines.append(f"X-Tenant: {ask.tenant}")
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


class Stream(asyncio.Protocol):
    """A request on its connection; `ended` is set when the connection is gone."""

    def __init__(self, content: bytes, ended: "asyncio.Future[None]") -> None:
        self.reads: list[tuple[int, bytes]] = []
        self.written_ns: int | None = None
        self._content = content
        self._ended = ended
        self._size = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.write(self._content)
        self.written_ns = time.monotonic_ns()
        self._content = b""

    def data_received(self, data: bytes) -> None:
        """Stamp what came."""
        self.reads.append((time.monotonic_ns(), data))
        self._size += len(data)
        if self._size > READ_BYTES_MAX:
            self.leave()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits."""
        del error
        if not self._ended.done():
            self._ended.set_result(None)

    def leave(self) -> None:
        """Go away at once, as a client does that has seen enough."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class Answer:
    """What the reads of one answer hold: instants on CLOCK_MONOTONIC, one a token."""

    status: int = 0
    tokens_ns: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    counted_prompt: int | None = None
    counted_output: int | None = None
    complete: bool = False
    trouble: str = ""


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Reader:
    """What httptools tells of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._decoder = msgspec.json.Decoder(_Event)
        self._parser = httptools.HttpResponseParser(self)
        self._at_ns = 0

    def read(self, at_ns: int, data: bytes) -> None:
        """Take what came at one instant."""
        self._at_ns = at_ns
        self._parser.feed_data(data)

    def on_status(self, status: bytes) -> None:
        """Take the status."""
        del status
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Take events whole; an answer that is no stream is its trouble's text."""
        if self._answer.status != 200:
            self._answer.trouble += data.decode(errors="replace")
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """Know that nothing was cut off."""
        self._answer.complete = True

    def _event(self, content: bytes) -> None:
        if content == b"[DONE]":
            return
        event, answer = self._decoder.decode(content), self._answer
        if event.error is not None:
            answer.trouble = str(event.error)
        if event.usage is not None:
            answer.counted_prompt = event.usage.prompt_tokens
            answer.counted_output = event.usage.completion_tokens
        for choice in event.choices[:1]:
            answer.finish = choice.finish_reason or answer.finish
            if choice.token_ids is not None:
                answer.ids += choice.token_ids
                answer.tokens_ns += [self._at_ns] * len(choice.token_ids)
            elif choice.text:
                # A server that tells no ids: an event with text is taken as one token.
                answer.tokens_ns.append(self._at_ns)
            if choice.text:
                answer.text.append(choice.text)


def answer_of(reads: list[tuple[int, bytes]]) -> Answer:
    """Return what the reads hold; what is no HTTP or no JSON is its trouble."""
    answer = Answer()
    reader = _Reader(answer)
    try:
        for at_ns, data in reads:
            reader.read(at_ns, data)
    except (httptools.HttpParserError, msgspec.DecodeError) as error:
        # What a callback raised says more than that one did.
        answer.trouble = f"not readable: {error.__context__ or error}"
    return answer
