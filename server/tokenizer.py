"""The model's tokenizer: text to ids, and the decoders of ids back to text.

Owns what a server asks of one, built from a GGUF's lists or a folder's tokenizer.json;
server/cli.py builds it once at start, request handlers encode with it. Long texts are encoded on
one thread that lets the event loop run; a text that cannot fit is known by its bytes, unencoded.
(From a GGUF's lists it takes 60 ms, less than to load a saved one: so nothing is cached on disk.)
"""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from engine.model_files import brief
from engine.spec import SpecError, TokenizerMetadata
from server.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from server.gguf_tokenizer import tokenizer_of_gguf

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

LONG_CHARS = 64 * 1024
"""Texts above this are encoded off the event loop: about 10 ms of work."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies with a fallback to bytes spell one."""


class Tokenizer:
    """Encodes prompts; ids and text only, no model."""

    def __init__(self, backend: Backend) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._contents = {id: token.content for id, token in added.items()}
        self.spelled = _spelled([self._contents[id] for id in self._special])
        # A second one that takes nothing for special. Made aside: it takes longer than the first.
        self._plain = self._thread.submit(_without_special, backend)
        self._table = _byte_table(backend, self._special)
        self._shown = self._table and [
            self._contents[id].encode() if id in self._special else part
            for id, part in enumerate(self._table)
        ]
        self._token_bytes_max = _token_bytes_max(backend, self._table)
        single = {part for part in self._table or () if len(part) == 1}
        # A byte without a token of its own may be dropped: small vocabularies lack the rarest.
        self._dropped = bytes(byte for byte in range(256) if bytes([byte]) not in single)

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """Return a fresh decoder for one sequence; with `special` it shows special tokens too."""
        table = self._shown if special else self._table
        if table is not None:
            return ByteDetokenizer(table)
        if special:
            return WindowDetokenizer(self._decode_shown, frozenset())
        return WindowDetokenizer(self._backend.decode, self._special)

    def _decode_shown(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """Return the text of one token as UTF-8, perhaps a part of a character; special ones too.

        Ids without a token have none.
        """
        if self._shown is not None:
            return self._shown[id] if id < len(self._shown) else b""
        token = self._backend.id_to_token(id) or ""
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    def token_name(self, id: int) -> str:
        """Return the text of one token; what is no whole character is named by its bytes."""
        spelled = self.token_bytes(id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def prefix_tokens(self, text: str, ids: list[int]) -> int:
        """Return how many special tokens the model wanted in front of a text."""
        count = 0
        while count < len(ids) and ids[count] in self._special:
            if text.startswith(self._contents[ids[count]]):
                break
            count += 1
        return count

    def tokens_floor(self, text: str) -> int:
        """Return a number of tokens that `text` surely needs; costs nothing worth mentioning."""
        if self._token_bytes_max is None:
            return 0
        kept = text.encode().translate(None, self._dropped)
        return len(kept) // self._token_bytes_max

    async def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of `text`; with `add_special` also those the model wants around it."""
        if not self.is_long(len(text)):
            return self._backend.encode(text, add_special_tokens=add_special).ids
        return await self.aside(self._encode_long, text, add_special)

    def _encode_long(self, text: str, add_special: bool) -> list[int]:
        # The batch call lets go of the GIL while it works; encoding one text does not.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        return encoding.ids

    async def encode_marked(self, text: str, mark: str) -> list[int]:
        """Return the ids of a rendered chat; spellings with `mark` in them are text, without it."""
        return await self.aside(self._encode_marked, text, mark)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        plain = self._plain.result()

        def ids_of(part: str) -> list[int]:
            return plain.encode(part.replace(mark, ""), add_special_tokens=False).ids

        (whole,) = self._backend.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        done = 0
        for id, (begin, end) in zip(whole.ids, whole.offsets, strict=True):
            if id in self._special:
                ids += [*ids_of(text[done:begin]), id]
                done = end
        return ids + ids_of(text[done:])

    async def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens shown."""
        if not self.is_long(len(ids)):
            return self._backend.decode(ids, skip_special_tokens=False)
        return await self.aside(self._backend.decode, ids, False)

    def is_long(self, count: int) -> bool:
        """Tell whether work on so many characters or tokens belongs off the event loop."""
        return count > LONG_CHARS

    async def aside(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Return what `work` returns, done on the tokenizer's one thread, in turn."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, *args)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _spelled(contents: list[str]) -> re.Pattern[str] | None:
    """Return what finds the spelling of a special token; longer ones first, as they match first."""
    # One of a single character would be in every text, and has no middle to put a mark into.
    spellings = sorted((text for text in contents if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _without_special(backend: Backend) -> Backend:
    plain = Backend.from_str(backend.to_str())
    plain.encode_special_tokens = True
    return plain


def build_tokenizer(metadata: TokenizerMetadata) -> Tokenizer:
    """Return the model's tokenizer, or raise SpecError naming what cannot be used."""
    if metadata.kind == "gguf":
        try:
            return Tokenizer(tokenizer_of_gguf(metadata))
        except (ValueError, TypeError, LookupError) as error:
            line = f"the lists under tokenizer.ggml do not fit together: {brief(error)}"
            raise SpecError(line) from error
    file = Path(metadata.folder or "") / "tokenizer.json"
    if not file.is_file():
        raise SpecError(f"{file}: no such file; the server needs the tokenizer in this form")
    try:
        return Tokenizer(Backend.from_file(str(file)))
    except Exception as error:  # the library raises nothing more precise
        raise SpecError(f"{file}: cannot be used: {brief(error)}") from error


def byte_of_char() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's map)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    table |= {chr(256 + index): byte for index, byte in enumerate(hidden)}
    return table


def _byte_table(backend: Backend, special: frozenset[int]) -> list[bytes] | None:
    """Return the raw bytes of each id, none for special tokens; None when not byte-level."""
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    tokens = {id: token for token, id in backend.get_vocab(with_added_tokens=True).items()}
    tokens |= {id: added.content for id, added in backend.get_added_tokens_decoder().items()}
    bytes_of = byte_of_char()
    table = [b""] * (max(tokens, default=-1) + 1)
    for id, token in tokens.items():
        if id not in special:
            try:
                table[id] = bytes(map(bytes_of.__getitem__, token))
            except KeyError:
                table[id] = token.encode()  # an added token that is not spelled in bytes
    return table


def _token_bytes_max(backend: Backend, table: list[bytes] | None) -> int | None:
    """Return the most bytes of text one token can stand for; None where there is no such bound."""
    added = backend.get_added_tokens_decoder().values()
    if table is None or backend.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token swallows any amount of blanks beside it
    longest = max((len(token.content.encode()) for token in added), default=1)
    return max(longest, *map(len, table))
