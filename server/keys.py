"""The keys that open this server, and who holds each: a name and perhaps a tenant.

Owns the reading of --api-key and --api-keys-file, and the comparison of a key that a client shows
with those it knows, in a time that depends on neither. server/gate.py asks. Keys are kept as their
SHA-256 alone; must never log, show or return one.
"""

import hashlib
import hmac
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from server.config import ServerConfig

KEYS_MAX = 1000
TENANT_CHARS_MAX = 64
KEY_CHARS_ADVISED = 16
FIELDS = frozenset({"name", "key", "key_sha256", "tenant"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who holds a key. One with a tenant may generate, in that tenant's name, and no more."""

    name: str
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one server: SHA-256 digests and their holders."""

    known: tuple[tuple[bytes, Caller], ...]

    def caller_of(self, key: bytes) -> Caller | None:
        """Return who holds this key; every known one is compared, whichever is right."""
        shown = digest(key)
        found: Caller | None = None
        for known, caller in self.known:
            if hmac.compare_digest(shown, known):
                found = caller
        return found


def digest(secret: bytes) -> bytes:
    """Return the SHA-256 of a secret."""
    return hashlib.sha256(secret).digest()


def read_keys(config: ServerConfig) -> KeyRing | None:
    """Return the keys that the configuration names, None without any; raises ConfigError.

    The file is TOML: a table `[[key]]` for each, with `name`, one of `key` and `key_sha256` (64
    hexadecimal digits), and `tenant` for a key that may only generate.
    """
    known = [
        (digest(key.encode()), Caller(name=f"--api-key {number}"))
        for number, key in enumerate(config.api_key, 1)
    ]
    if config.api_keys_file is not None:
        known += _read_file(Path(config.api_keys_file))
    if len({secret for secret, _ in known}) < len(known):
        raise ConfigError("--api-key and --api-keys-file: a key is given twice")
    if len(known) > KEYS_MAX:
        raise ConfigError(f"--api-keys-file: at most {KEYS_MAX} keys can be held")
    return KeyRing(tuple(known)) if known else None


def _read_file(path: Path) -> list[tuple[bytes, Caller]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path}: {error.strerror}") from error
    except ValueError as error:
        # The parser's own message may quote the line, and the line may hold a key.
        raise ConfigError(f"--api-keys-file {path}: not valid TOML") from error
    entries = content.get("key")
    if not isinstance(entries, list) or not entries or content.keys() != {"key"}:
        raise ConfigError(f"--api-keys-file {path}: it must hold [[key]] tables and nothing else")
    found = [_entry(f"--api-keys-file {path}: key {n}", e) for n, e in enumerate(entries, 1)]
    names = [caller.name for _, caller in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"--api-keys-file {path}: two keys have the same name")
    return found


def _entry(place: str, entry: Any) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError(f"{place}: every field must be a string")
    if unknown := entry.keys() - FIELDS:
        raise ConfigError(f"{place}: unknown field {min(unknown)}")
    tenant = entry.get("tenant")
    for name, most in (("name", 128), ("tenant", TENANT_CHARS_MAX)):
        text = entry.get(name)
        if text is not None and not (0 < len(text) <= most and _visible(text)):
            raise ConfigError(f"{place}: {name} must be 1 to {most} visible ASCII characters")
    if "name" not in entry:
        raise ConfigError(f"{place}: name is missing")
    if ("key" in entry) == ("key_sha256" in entry):
        raise ConfigError(f"{place}: one of key and key_sha256 is needed")
    caller = Caller(name=entry["name"], tenant=tenant)
    if "key" in entry:
        if not entry["key"] or not _visible(entry["key"]):
            raise ConfigError(f"{place}: key must be visible ASCII characters")
        return digest(entry["key"].encode()), caller
    try:
        secret = bytes.fromhex(entry["key_sha256"])
    except ValueError:
        secret = b""
    if len(secret) != hashlib.sha256().digest_size:
        raise ConfigError(f"{place}: key_sha256 must be 64 hexadecimal digits")
    return secret, caller


def _visible(text: str) -> bool:
    return all("!" <= char <= "~" for char in text)
