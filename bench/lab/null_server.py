"""A server that computes nothing and answers on the beat: what the load generator is measured on.

Owns the answer, an OpenAI stream of one token a beat and as many as were asked for; ceiling.py
starts it as a process, `python -m bench.lab.null_server`, and reads its port from its first line.
It costs far less a token than a real server, so that what gives out first is the generator.
"""

import argparse
import asyncio
import sys
from typing import cast

import httptools
import msgspec
import uvloop

BEAT_S = 0.01
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"connection: close\r\n\r\n"
)
MODELS = b'{"object":"list","data":[{"id":"null","object":"model"}]}'
MODELS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n" % len(MODELS)
)
TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[7]}]}\n\n'
END = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'


class _Asked(msgspec.Struct, frozen=True):
    max_tokens: int = 1


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One connection, one answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._place = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Read the request."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """Take the path."""
        self._place = url

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """Answer."""
        assert self._transport is not None
        if not self._place.endswith(b"/completions"):
            self._transport.write(MODELS_HEAD + MODELS)
            self._transport.close()
            return
        asked = msgspec.json.decode(self._body, type=_Asked)
        self._transport.write(HEAD)
        asyncio.get_running_loop().call_later(BEAT_S, self._beat, asked.max_tokens)

    def _beat(self, left: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if left:
            self._transport.write(_chunk(TOKEN))
            asyncio.get_running_loop().call_later(BEAT_S, self._beat, left - 1)
        else:
            self._transport.write(_chunk(END) + b"0\r\n\r\n")
            self._transport.close()


async def serve() -> None:
    """Serve on a free port until the input ends."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(Connection, "127.0.0.1", 0, backlog=4096)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    listening.close()


def main() -> int:
    """Serve."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    uvloop.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
