"""Any OpenAI-compatible server over HTTP, to be compared: streamed completions of token ids.

Owns the driver alone; bench/drive.py runs it. Standard library alone: a thread a connection costs
less than a framework that stands between the stamp and the socket.
"""

import http.client
import json
import queue
import threading
from typing import Any
from urllib.parse import urlsplit

from bench.workload import Job

WAIT_S = 600


class Server:
    """A server at `url`; `extra` goes into every body."""

    def __init__(self, url: str, model: str = "m", extra: dict[str, Any] | None = None) -> None:
        self._address = urlsplit(url)
        fixed = {"model": model, "temperature": 0, "stream": True, "ignore_eos": True}
        self._body: dict[str, Any] = fixed | (extra or {})
        self._gained: queue.SimpleQueue[tuple[int, int] | Exception] = queue.SimpleQueue()

    def submit(self, number: int, job: Job) -> None:
        """Send a request."""
        body = self._body | {"prompt": job.ids, "max_tokens": job.answer}
        threading.Thread(target=self._ask, args=(number, json.dumps(body)), daemon=True).start()

    def _ask(self, number: int, body: str) -> None:
        connection = http.client.HTTPConnection(self._address.netloc, timeout=WAIT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"{self._address.path}/v1/completions", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read(300)!r}")
            for line in answer:
                if line.startswith(b"data: {"):
                    self._count(number, json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._gained.put(error)
        finally:
            connection.close()

    def _count(self, number: int, event: dict[str, Any]) -> None:
        """Tell of an event that brings a token; one that only ends or counts brings none."""
        choices = event.get("choices")
        if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
            self._gained.put((number, 1))

    def poll(self) -> list[tuple[int, int]]:
        """Wait a moment for tokens."""
        try:
            found = self._gained.get(timeout=0.005)
        except queue.Empty:
            return []
        if isinstance(found, Exception):
            raise SystemExit(f"a request failed: {found}")
        return [found]


driver = Server
