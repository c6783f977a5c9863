"""Any OpenAI-compatible server over HTTP, to be compared: streamed completions of token ids.

Owns the driver alone, and the server if it is told how to start one; bench/drive.py runs it. One
thread and a selector over plain sockets: the client shares the processor with the server that it
judges, and a thread or a coroutine a stream would take more of it. Standard library alone.
"""

import http.client
import json
import selectors
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bench.workload import Job

START_S = 300
POLL_S = 0.005
READ_BYTES = 2**16


@dataclass
class Stream:
    """A request that is being answered: its bytes so far, and how many tokens were told."""

    number: int
    status: int = 0
    raw: bytearray = field(default_factory=bytearray)
    text: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    over: bool = False

    def take(self, new: bytes) -> int:
        """Return the tokens that these bytes bring; raises ValueError for a refusal."""
        self.raw += new
        if not self.status:
            end = self.raw.find(b"\r\n\r\n")
            if end < 0:
                return 0
            head = bytes(self.raw[:end]).lower()
            self.status = int(head.split()[1])
            if self.status != 200 or b"transfer-encoding: chunked" not in head:
                raise ValueError(f"status {self.status}: {bytes(self.raw[end:][:300])!r}")
            del self.raw[: end + 4]
        content, self.over = unchunk(self.raw)
        self.text += content
        before = self.tokens
        while (end := self.text.find(b"\n")) >= 0:
            line = bytes(self.text[:end])
            del self.text[: end + 1]
            if line.startswith(b"data: {"):
                self.tokens = tokens_after(json.loads(line[6:]), self.tokens)
        return self.tokens - before


def unchunk(raw: bytearray) -> tuple[bytes, bool]:
    """Take whole chunks off the front of a body; return what they hold, and whether it is over."""
    found = bytearray()
    while (end := raw.find(b"\r\n")) >= 0:
        size = int(raw[:end].split(b";")[0], 16)
        if len(raw) < end + 4 + size:
            break
        found += raw[end + 2 : end + 2 + size]
        del raw[: end + 4 + size]
        if not size:
            return bytes(found), True
    return bytes(found), False


def tokens_after(event: dict[str, Any], before: int) -> int:
    """Return a request's tokens after an event: what it says itself, else one more for its text.

    Servers merge tokens whose text ends inside a character, and those that a slow reader left, so
    they are asked to count; vLLM and Iterscope do in `usage`, llama.cpp in `timings`.
    """
    if "error" in event:
        raise ValueError(f"{event['error']}")
    told = (event.get("usage") or {}).get("completion_tokens")
    told = told or (event.get("timings") or {}).get("predicted_n")
    if told is not None:
        return max(before, int(told))
    choices = event.get("choices")
    return before + bool(choices and (choices[0].get("text") or not choices[0]["finish_reason"]))


class Server:
    """The server at `url`, or the one that `serve` starts; `extra` goes into every body."""

    def __init__(
        self,
        url: str = "",
        *,
        serve: list[str] | None = None,
        ready: str = "/health",
        model: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        if serve:
            port = str(free_port())
            url = f"http://127.0.0.1:{port}"
            start([word.replace("{port}", port) for word in serve], url + ready)
        self._address = urlsplit(url)
        fixed = {"model": model or self._first_model(), "temperature": 0, "ignore_eos": True}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        self._body: dict[str, Any] = fixed | {"stream": True, "stream_options": usage}
        self._body |= extra or {}
        self._selector = selectors.DefaultSelector()

    def _first_model(self) -> str:
        name: str = self._ask("GET", "/v1/models")["data"][0]["id"]
        return name

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON that answers one question."""
        connection = http.client.HTTPConnection(self._address.netloc, timeout=START_S)
        sent = None if body is None else json.dumps(body)
        kind = {"Content-Type": "application/json"}
        connection.request(method, self._address.path + path, sent, kind)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {text[:300]!r}")
        found: dict[str, Any] = json.loads(text)
        return found

    def loss(self, ids: list[int]) -> float:
        """Return minus the log-probability of the tokens after the first, in nats.

        Asked as OpenAI's completions have it: the prompt again, each token with its own.
        """
        asked = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        body = {"model": self._body["model"], "stream": False} | asked
        (choice,) = self._ask("POST", "/v1/completions", body)["choices"]
        told = (choice.get("logprobs") or {}).get("token_logprobs", [])
        if len(told) != len(ids) + 1:
            raise ValueError(f"{len(told)} log-probabilities for {len(ids)} tokens and an answer")
        return -float(sum(told[1:-1]))

    def submit(self, number: int, job: Job) -> None:
        """Send a request."""
        body = json.dumps(self._body | {"prompt": job.ids, "max_tokens": job.answer}).encode()
        head = (
            f"POST {self._address.path}/v1/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        link = socket.create_connection((self._address.hostname or "", self._address.port or 80))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(head.encode() + body)
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, Stream(number))

    def poll(self) -> list[tuple[int, int]]:
        """Wait a moment for tokens."""
        gained = []
        for key, _ in self._selector.select(POLL_S):
            link, stream = key.fileobj, key.data
            assert isinstance(link, socket.socket)
            new = link.recv(READ_BYTES)
            if tokens := stream.take(new):
                gained.append((stream.number, tokens))
            if stream.over or not new:
                self._selector.unregister(link)
                link.close()
                if not stream.over:
                    raise ValueError(f"an answer broke off after {stream.tokens} tokens")
        return gained


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start(command: list[str], ready: str) -> None:
    """Start a server in this process's group, and wait until it is ready."""
    process = subprocess.Popen(command, stdout=2)
    address, deadline = urlsplit(ready), time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{command[0]} ended with {process.returncode}")
        connection = http.client.HTTPConnection(address.netloc, timeout=5)
        try:
            connection.request("GET", address.path)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise SystemExit(f"{command[0]} was not ready after {START_S} s")


driver = Server
