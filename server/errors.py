"""What goes wrong on the client's side: one exception, shaped as OpenAI's error object.

Owns ApiError and its JSON; raised by everything between the socket and the engine, turned into a
response by server/app.py, or into an error event by a stream that has begun. Must never carry text
of a prompt, a traceback, or a number that JSON cannot hold.
"""

import http
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ApiError(Exception):
    """An answer that is an error: HTTP status, a sentence, and OpenAI's type, param and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """Return OpenAI's name of the kind of error."""
        if self.status == http.HTTPStatus.UNAUTHORIZED:
            return "authentication_error"
        if self.status == http.HTTPStatus.FORBIDDEN:
            return "permission_error"
        if self.status == http.HTTPStatus.NOT_FOUND:
            return "not_found_error"
        if self.status == http.HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """Return the JSON of `{"error": {message, type, param, code}}`."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """Return a 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str) -> ApiError:
    """Return a 400 for a field that would change the answer, and that is not built yet."""
    return invalid(param, f"{param} is not supported yet", code="unsupported_parameter")


def engine_down(message: str, *, retry_after_s: int) -> ApiError:
    """Return a 503 that says when a retry may succeed."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code="engine_unavailable", headers=headers)


def overloaded(message: str, *, code: str, retry_after_s: float) -> ApiError:
    """Return a 429 that says when there should be room again."""
    return ApiError(429, message, code=code, headers=_retry(retry_after_s))


def overdue(message: str, *, retry_after_s: float) -> ApiError:
    """Return a 503 for a request that waited longer than the operator lets anybody wait."""
    return ApiError(503, message, code="queue_deadline", headers=_retry(retry_after_s))


def _retry(after_s: float) -> Mapping[str, str]:
    """Return the headers that say when: in whole seconds, and as OpenAI's clients prefer it."""
    return {
        "Retry-After": str(max(1, math.ceil(after_s))),
        "retry-after-ms": str(max(1, math.ceil(after_s * 1000))),
    }
