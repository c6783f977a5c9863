"""A model's chat template in a process of its own, which the server asks for each chat's prompt.

Owns that process: its start, the wait for its answers on one thread, and a new one when a chat
cost it its life. served_model.py starts it, server/openai_api.py renders with it. A template comes
with a model that nobody vouches for: an expression like 'a' * 10**10 costs its gigabytes while it
is compiled, another only over certain messages. Must never render one in this process.
"""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from server.chat_template import Message
from server.errors import ApiError, invalid
from server.template_child import RENDERED, TEXT_CHARS_MAX, receive, send

PATIENCE_S = 30.0
"""Far above the CPU time a chat may take: the machine may be busy."""
SOURCE_CHARS_MAX = 2**20
ANSWER_BYTES_MAX = 4 * TEXT_CHARS_MAX + 1
TOO_MUCH = "it takes too much memory or time for one short message"
TOO_MUCH_NOW = "it takes too much memory or time for these"


class TemplateProcess:
    """One template, and the process that renders it; `verdict` says whether it may be used."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Start the process; it compiles and tries the template meanwhile."""
        self._given = json.dumps([source, dict(tokens)]).encode()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._lock = threading.Lock()
        self._closed = False
        self._child: _Child | None = None
        self._trial = self._thread.submit(self._tried, len(source))

    def verdict(self) -> str:
        """Wait for the end of the trial; empty when the template may be used, else why not."""
        fault = self._trial.result()
        if fault:
            self.close()
        return fault

    async def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a chat; ApiError 400 when the template refuses it or cannot end."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._rendered, messages)

    def close(self) -> None:
        """End the process, whatever it does, and let the thread go."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._child is not None:
            self._child.end()

    # ---- on the one thread

    def _tried(self, source_chars: int) -> str:
        if source_chars > SOURCE_CHARS_MAX:
            return f"it is longer than {SOURCE_CHARS_MAX} characters"
        try:
            answer = self._start()
        except OSError:
            self._lose()
            return TOO_MUCH
        return "" if answer[:1] == RENDERED else answer[1:].decode()

    def _rendered(self, messages: Sequence[Message]) -> str:
        try:
            given = json.dumps(messages).encode()
        except RecursionError:
            raise invalid("messages", "messages are nested too deeply") from None
        try:
            if self._child is None:
                self._start()
            assert self._child is not None
            answer = self._child.ask(given)
        except OSError:
            self._lose()
            raise _refused(TOO_MUCH_NOW) from None
        text = answer[1:].decode()
        if answer[:1] != RENDERED:
            raise invalid("messages", text)
        return text

    def _start(self) -> bytes:
        """Start a process and return what it says of the template; OSError when it dies of it."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the server is shutting down")
            self._child = _Child()
        return self._child.ask(self._given)

    def _lose(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """The process and the socket to it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # Nothing of the folder that the operator stands in can be imported: -P.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "server.template_child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the server, which ends this when it no longer renders.
                process_group=0,
            )
        self._channel.settimeout(PATIENCE_S)

    def ask(self, content: bytes) -> bytes:
        """Send a frame and return the answer to it; OSError when there comes none."""
        send(self._channel, content)
        answer = receive(self._channel, ANSWER_BYTES_MAX)
        if not answer:
            raise ConnectionError("an empty answer")
        return answer

    def kill(self) -> None:
        """End it; from any thread, more than once."""
        self._process.kill()

    def end(self) -> None:
        """End it, wait for that, and let go of the socket."""
        self._process.kill()
        self._process.wait()
        self._channel.close()


def _refused(why: str) -> ApiError:
    return invalid("messages", f"the model's chat template refused: {why}")
