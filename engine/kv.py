"""The KV block pool: which blocks are free, held (by how many sequences), or cached for reuse.

Owns block numbers, reference counts and the prefix cache's index; nothing of the blocks' content.
The scheduler is the one caller. Block 0 belongs to padding rows and is never given out. Always:
free + used + cached = total. Never hands out part of an allocation, never frees a block twice.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """Return what the first block's digest is chained to: other salt, other cache."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def block_digests(parent: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
    """Return the names of full blocks' contents: each is its tokens and all that stand before them.

    A cryptographic hash, since a client that could make two contexts collide would read another
    client's answers.
    """
    digests = []
    for start in range(0, len(ids), block_bytes):
        block = ids[start : start + block_bytes]
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class KVPool:
    """`blocks` usable blocks of `block_tokens` tokens, numbered from 1."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        self.blocks_total = blocks
        self.block_tokens = block_tokens
        self.shared = 0
        # A stack, lowest number on top, so that timelines are the same in every run.
        self._free = list(range(blocks, 0, -1))
        self._references = [0] * (blocks + 1)
        self._digests: list[bytes | None] = [None] * (blocks + 1)
        self._by_digest: dict[bytes, int] = {}
        # Blocks that nobody holds and whose content is named: least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody holds and that hold nothing reusable."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content a later request may reuse."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.blocks_total - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that an allocation may take."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when fewer are available.

        Free blocks go first; then the least recently used cached ones lose their content.
        """
        if count > len(self._free) + len(self._idle):
            return None
        free, references = self._free, self._references
        taken = [free.pop() if free else self._evict() for _ in range(count)]
        for block in taken:
            references[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each block; named content stays until its block is needed.

        The last block goes first, so that of one sequence the tail is forgotten before the head.
        """
        references = self._references
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} was released twice"
            references[block] -= 1
            if references[block]:
                self.shared -= 1
            elif self._digests[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of digests whose content is here."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of these are cached and held by nobody."""
        return sum(1 for block in blocks if not self._references[block])

    def share(self, blocks: Sequence[int]) -> None:
        """Take one reference to each of the blocks that `lookup` found."""
        for block in blocks:
            if self._references[block]:
                self.shared += 1
            else:
                del self._idle[block]
            self._references[block] += 1

    def name(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Note that held blocks are full and what they hold; a twin that came first stays."""
        names, index = self._digests, self._by_digest
        for block, digest in zip(blocks, digests, strict=True):
            assert self._references[block] > 0, f"block {block} is held by nobody"
            if digest not in index and names[block] is None:
                names[block] = digest
                index[digest] = block

    def forget(self, blocks: Sequence[int]) -> None:
        """Let nobody find these held blocks any more: what they hold is not to be trusted."""
        for block in blocks:
            digest = self._digests[block]
            if digest is not None:
                del self._by_digest[digest]
                self._digests[block] = None

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.forget([block])
        return block

    def check(self, tables: list[list[int]]) -> None:
        """Assert that the pool and the sequences' block tables tell the same story."""
        held = [0] * (self.blocks_total + 1)
        for table in tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                held[block] += 1
        assert held[0] == 0, "block 0 belongs to padding"
        assert held == self._references, "reference counts differ from the tables"
        assert self.shared == sum(count - 1 for count in held if count)
        unheld = [*self._free, *self._idle]
        assert len(set(unheld)) == len(unheld), "a block is free twice"
        assert all(held[block] == 0 for block in unheld), "a held block is free"
        assert self.free + self.used + self.cached == self.blocks_total
        assert self.used == sum(1 for count in held if count), "a block leaked"
        named = {block for block, digest in enumerate(self._digests) if digest is not None}
        assert named == set(self._by_digest.values()), "the index names other blocks"
        assert named.issuperset(self._idle), "a cached block without a name"
        assert named.isdisjoint(self._free), "a free block with a name"
