"""`iterscope explain ID`: where every millisecond of one request went, as a waterfall or JSON.

Owns the command's flags and exit codes; server/cli.py calls `run_explain_command`. A running server
explains by itself, live requests too; a history or a file is read here, by the same code. Must
never write.
"""

import argparse
import sys
from shutil import get_terminal_size
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from server.explain_text import explanation_text
from server.source import NoAnswer, Source, add_source_flags, source_of
from server.terminal import ANSWERED, WRONG, refuse
from telemetry.explain_case import case_from_history
from telemetry.explanation import explain

ANSWER_S = 60.0
LOST = "server lost: it ended without a word, and the record ends here"


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the arguments of `iterscope explain`."""
    parser.add_argument("id", help="id of a request or a sequence, or the one its client gave")
    add_source_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")


def run_explain_command(args: argparse.Namespace) -> int:
    """Explain `args.id`; 0 when explained, 1 when nobody knows it or nobody answers."""
    try:
        with source_of(args) as source:
            body = _explained(source, args.id)
            name = source.name
    except NoAnswer as error:
        return refuse(str(error), WRONG)
    if body is None:
        return refuse(f"no request {args.id!r} is on record at {name}", WRONG)
    if args.json:
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    else:
        # Without a terminal nothing is cut: the reader is grep or a file.
        width = get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.write(explanation_text(body, width))
    return ANSWERED


def _explained(source: Source, asked: str) -> dict[str, Any] | None:
    if source.url is not None:
        return _ask_server(source.url, source.api_key, asked)
    case = case_from_history(source.ask, asked)
    if case is None:
        return None
    body = explain(case)
    if source.abandoned and case.end is None:
        body |= {"state": "lost", "error": LOST}
    return body


def _ask_server(url: str, api_key: str | None, asked: str) -> dict[str, Any] | None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # An id of dots alone would be taken for a step up the path.
    name = quote(asked, safe="").replace(".", "%2E")
    address = f"{url.rstrip('/')}/v1/requests/{name}"
    try:
        response = httpx.get(address, headers=headers, timeout=ANSWER_S, trust_env=False)
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(f"{url} does not answer: {error}") from error
    except ValueError as error:
        raise NoAnswer(f"{url} answered {response.status_code}") from error
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    if not response.is_success:
        raise NoAnswer(f"{url}: {body.get('error', {}).get('message', response.status_code)}")
    return body
