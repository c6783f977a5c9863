"""A reverse proxy of Python's own parts for tests: puts a server under a path prefix.

Owns the passing on of requests, cookies and Host included, and of answers as they come, so that
an event stream is not held back. What lies outside of its prefix is answered 404 by the proxy
itself and remembered: a page that leaves its prefix is found by that.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True, slots=True)
class Proxied:
    """Where the server is reached through the proxy, and the paths that missed its prefix."""

    url: str
    strays: list[str]


@contextmanager
def proxied(server_url: str, prefix: str) -> Iterator[Proxied]:
    """Serve what stands at `server_url` under `prefix` ("/tools/iterscope") of another port."""
    host = urlsplit(server_url).netloc
    strays: list[str] = []

    class Passing(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            inside = self.path.removeprefix(prefix)
            if inside == self.path or not inside.startswith("/"):
                strays.append(self.path)
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            upstream = http.client.HTTPConnection(host, timeout=60)
            try:
                upstream.putrequest(self.command, inside, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in HOP:
                        upstream.putheader(name, value)
                upstream.putheader("content-length", str(len(body)))
                upstream.endheaders(body)
                self._answer(upstream.getresponse())
            except (BrokenPipeError, ConnectionResetError, http.client.IncompleteRead):
                pass  # the browser left, as it does with a stream, or the server ended
            finally:
                upstream.close()

        def _answer(self, answer: http.client.HTTPResponse) -> None:
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while part := answer.read1(65536):
                self.wfile.write(part)
                self.wfile.flush()

        do_GET = do_POST = do_DELETE = _pass  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield Proxied(f"http://127.0.0.1:{listening.server_port}{prefix}", strays)
        listening.shutdown()
