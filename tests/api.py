"""A client of the OpenAI API for tests: plain requests, whole streams and bare sockets.

Owns no server: tests/servers.py starts one. Every answer of a stream is checked line by line, and
a bare socket lets a test break a connection as it likes.
"""

import json
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.servers import Server

HELLO = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
LONG = {"prompt": "go on", "max_tokens": 600, "ignore_eos": True, "temperature": 0}


def post(server: Server, path: str, body: object, **headers: str) -> httpx.Response:
    url = server.url + path
    return httpx.post(url, json=body, headers=headers, timeout=30, verify=False)


def complete(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server, "/v1/completions", {"temperature": 0, "return_token_ids": True} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the JSON of each event of a stream; every line must be data or blank."""
    url = server.url + path
    with httpx.stream("POST", url, json=body | {"stream": True}, verify=False) as response:
        assert response.status_code == 200, response.read()
        lines = list(response.iter_lines())
    assert all(line == "" or line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def still_answers(server: Server) -> None:
    assert complete(server, {"prompt": [5, 6, 7], "max_tokens": 2})["usage"]["total_tokens"] == 5


def settle(server: Server) -> None:
    """Wait until a server that a test has used is as idle as before it, and answers."""
    server.wait(lambda: not in_flight(server))
    server.wait_idle()
    still_answers(server)


def ids(count: int) -> list[int]:
    return [3 + index % 256 for index in range(count)]


def raw_request(
    server: Server,
    body: dict[str, Any],
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    **headers: str,
) -> socket.socket:
    """Send a request over a bare socket, which a test can then break as it likes."""
    text = json.dumps(body)
    made = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=20)
    lines = {"Host": "127.0.0.1", "Content-Length": str(len(text))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    made.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n{text}".encode())
    return made


def in_flight(server: Server) -> list[Any]:
    listed: list[Any] = server.get("/v1/requests").json()["data"]
    return listed


def bring(server: Server, path: Path) -> str:
    """Send a recorded file to the server; return the name that it has there."""
    answer = httpx.post(f"{server.url}/telemetry/incidents", content=path.read_bytes(), timeout=60)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["name"]
    return name
