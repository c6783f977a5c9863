"""The KV block pool: which blocks are free, which are held, and by how many sequences.

Owns block numbers and reference counts, nothing of their content. The scheduler is the one caller.
Block 0 belongs to padding rows and is never given out. Always: free + used + cached = total.
Never hands out part of an allocation, never frees a block twice.
"""


class KVPool:
    """`blocks` usable blocks of `block_tokens` tokens, numbered from 1."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        self.blocks_total = blocks
        self.block_tokens = block_tokens
        # A stack, lowest number on top, so that timelines are the same in every run.
        self._free = list(range(blocks, 0, -1))
        self._references = [0] * (blocks + 1)

    @property
    def free(self) -> int:
        """Blocks that nobody holds and that hold nothing reusable."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Free blocks whose content a later request may reuse."""
        return 0

    @property
    def used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.blocks_total - len(self._free)

    @property
    def available(self) -> int:
        """Blocks that an allocation may take."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when fewer are available."""
        if count > len(self._free):
            return None
        free, references = self._free, self._references
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            references[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each block; those without any become free."""
        references = self._references
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} was released twice"
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)

    def check(self, tables: list[list[int]]) -> None:
        """Assert that the pool and the sequences' block tables tell the same story."""
        held = [0] * (self.blocks_total + 1)
        for table in tables:
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                held[block] += 1
        assert held[0] == 0, "block 0 belongs to padding"
        assert held == self._references, "reference counts differ from the tables"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(held[block] == 0 for block in self._free), "a held block is free"
        assert self.free + self.used + self.cached == self.blocks_total
        assert self.used == sum(1 for count in held if count), "a block leaked"
