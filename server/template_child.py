"""The process that renders a model's chat template, and nothing else.

Owns its own limits, of memory for its life and of CPU for each chat, and the loop that answers
server/template_process.py over a socket. A template comes with a model that nobody vouches for: one
that goes off ends this process, and no other. Must never be imported by the server for its effects.
"""

import json
import math
import resource
import socket
import struct
import sys

import jinja2

from server.chat_template import ChatTemplate
from server.errors import ApiError

MEMORY_BYTES = 2**30
CPU_S = 2
TEXT_CHARS_MAX = 2**25
REFUSAL_CHARS_MAX = 1000
LENGTH = struct.Struct(">I")
RENDERED, REFUSED = b"T", b"R"
MESSAGES = ({"role": "user", "content": "hello"},)


def receive(channel: socket.socket, bytes_max: int) -> bytes:
    """Return the next frame; ConnectionError at the end, or at one that is longer."""
    (length,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    if length > bytes_max:
        raise ConnectionError("a frame is too long")
    return _exactly(channel, length)


def send(channel: socket.socket, content: bytes) -> None:
    """Write one frame."""
    channel.sendall(LENGTH.pack(len(content)) + content)


def _exactly(channel: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        piece = channel.recv(min(2**20, count - len(content)))
        if not piece:
            raise ConnectionError("the other end is gone")
        content += piece
    return bytes(content)


def _limit_cpu() -> None:
    """Let this process use so much more CPU time and no more; the kernel ends it then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _answer(template: ChatTemplate, given: bytes) -> bytes:
    try:
        text = template.render(json.loads(given))
        if len(text) > TEXT_CHARS_MAX:
            return REFUSED + f"it makes more than {TEXT_CHARS_MAX} characters of them".encode()
        return RENDERED + text.encode()
    except (ApiError, ValueError) as error:
        return REFUSED + str(error)[:REFUSAL_CHARS_MAX].encode(errors="replace")


def main() -> None:
    """Compile the template, try it once, say what is wrong with it, and render what comes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _limit_cpu()
        source, tokens = json.loads(receive(channel, MEMORY_BYTES))
        try:
            template = ChatTemplate(source, tokens)
        except jinja2.TemplateSyntaxError as error:
            send(channel, REFUSED + f"line {error.lineno}: {error.message}".encode())
            return
        # A template may refuse this message: then it works, and says so to whoever sends such one.
        _answer(template, json.dumps(MESSAGES).encode())
        send(channel, RENDERED)
        while True:
            given = receive(channel, MEMORY_BYTES)
            _limit_cpu()
            send(channel, _answer(template, given))


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:
        sys.exit(0)
