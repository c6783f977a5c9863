"""JSON bodies into structs: what is wrong is named, and what would be dear to decode is refused.

Owns the decoding of a body and its bounds; server/schemas.py says what bodies may hold, request
handlers call `decode`. JSON is decoded on the event loop, so its cost must be bounded by more than
its bytes: a list of two characters costs as much as a page of text. Raises nothing but ApiError.
"""

import re
from typing import Any, TypeVar

import msgspec

from server.errors import ApiError, invalid

SMALL_BYTES = 64 * 1024
"""A body below this may hold anything: the dearest costs some 10 ms."""
CONTAINERS_MAX = 65_536
"""Lists and objects of one body, brackets in its texts included: each costs about 1 us."""
DETAIL_BYTES_MAX = 256 * 1024
"""Bytes of any field that is no text: none needs more, and some would cost seconds."""

Decoded = TypeVar("Decoded", bound=msgspec.Struct)

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_VALUE = re.compile(r"(?<=Invalid enum value) .*", re.DOTALL)
"""What a client sent where a choice of words was wanted; errors carry nothing that it sent."""
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_BYTE = re.compile(r"\(byte (?P<byte>\d+)\)")
_KEY = re.compile(rb'"(?P<name>\w+)"\s*:\s*(?:\{[^{}]*:\s*)?-?\w*$')


class Details(msgspec.Struct, frozen=True):
    """The fields of any body that can hold much that is no text, unread."""

    stop: msgspec.Raw = msgspec.Raw()
    stop_token_ids: msgspec.Raw = msgspec.Raw()
    logit_bias: msgspec.Raw = msgspec.Raw()


def decode(data: bytes, kind: type[Decoded]) -> Decoded:
    """Return the body as `kind`; ApiError 400 naming the field at fault, in `param`."""
    try:
        if len(data) > SMALL_BYTES:
            _check_cost(data)
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), "") from error
    except msgspec.DecodeError as error:
        raise _malformed(data, str(error)) from error
    except RecursionError:
        raise invalid(None, "the JSON is nested too deeply") from None


def _check_cost(data: bytes) -> None:
    """Refuse a large body whose values are too many; looks at it without making any of them."""
    if data.count(b"[") + data.count(b"{") > CONTAINERS_MAX:
        raise invalid(None, f"the body holds more than {CONTAINERS_MAX} lists and objects")
    details = msgspec.json.decode(data, type=Details)
    for name in Details.__struct_fields__:
        check_detail(getattr(details, name), name)


def check_detail(raw: msgspec.Raw, name: str) -> None:
    """Refuse a field that is not worth reading for its size alone."""
    if len(memoryview(raw)) > DETAIL_BYTES_MAX:
        raise invalid(name, f"{name} is larger than {DETAIL_BYTES_MAX} bytes")


def decode_field(raw: bytes, kind: Any, path: str) -> Any:
    """Return a field that a struct left unread as `kind`; ApiError 400 naming the place in it."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), path) from error
    except msgspec.DecodeError as error:  # a raw field was not looked into before
        raise invalid(path, f"the body is not JSON: {error}") from error
    except RecursionError:
        raise invalid(path, f"{path} is nested too deeply") from None


def _named(message: str, path: str) -> ApiError:
    """Return the 400 of msgspec's message about a value at `path`, its field's name in `param`."""
    found = _PLACE.match(message)
    assert found is not None
    what, inner = _VALUE.sub("", found["what"]), found["path"] or ""
    missing = _MISSING.search(what)
    param = (
        path + inner if inner.startswith("[") or not path else ".".join(filter(None, (path, inner)))
    )
    param = param.removesuffix("[...]")  # a value of an object whose keys are the client's
    if missing:
        param = ".".join(filter(None, (param, missing["name"])))
        what = "this field is required"
    return invalid(param or None, f"{param}: {what}" if param else f"the body: {what}")


def _malformed(data: bytes, message: str) -> ApiError:
    """Name the field before the bad byte: NaN and Infinity are the usual case, and not JSON."""
    found = _BYTE.search(message)
    param = None
    if found:
        byte = int(found["byte"])
        key = _KEY.search(data[max(0, byte - 100) : byte + 1])
        param = key["name"].decode() if key else None
    return invalid(param, f"the body is not JSON: {message}")
