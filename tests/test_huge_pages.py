"""Memory in huge pages: zeroed, aligned, given back, and asked for as such for what steps read.

Owns the tests of kernels/huge_pages.py.
"""

import gc
import re
from pathlib import Path

import pytest
import torch

from kernels.base import AttentionShape
from kernels.huge_pages import ALIGNMENT, CHUNK_BYTES, PAGE_BYTES, HugePages
from kernels.native_ops import NativeInt8Ops, NativeWeight, threads
from kernels.native_step import NativeBackend, NativeCache

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


def flags_at(tensor: torch.Tensor) -> set[str]:
    """Return the kernel's flags of the mapping that a tensor lies in."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no mapping holds the tensor")


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def assert_asked_for(tensor: torch.Tensor) -> None:
    """A kernel that has huge pages was asked for them here; on another it is memory as any."""
    assert ("hg" in flags_at(tensor)) == HAS_HUGE_PAGES


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_pieces_are_zero_aligned_and_apart(dtype: torch.dtype) -> None:
    pages = HugePages()
    shapes = [(3,), (5, 7), (0,), (1, 1), (4096, 33)]
    found = [pages.zeros(shape, dtype) for shape in shapes]
    for number, tensor in enumerate(found, 1):
        assert not tensor.any()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    assert [tensor.shape for tensor in found] == [torch.Size(shape) for shape in shapes]
    for number, tensor in enumerate(found, 1):
        assert (tensor == number).all()


def test_the_first_piece_begins_with_a_page() -> None:
    tensor = HugePages().zeros((10,), torch.uint8)
    assert tensor.data_ptr() % PAGE_BYTES == 0
    assert_asked_for(tensor)


def test_a_piece_larger_than_a_chunk_has_a_mapping_of_its_own() -> None:
    pages = HugePages()
    small = pages.zeros((1,), torch.uint8)
    large = pages.zeros((CHUNK_BYTES + 1,), torch.uint8)
    large[-1] = 7
    assert not small.any()
    assert int(large[-1]) == 7


def test_what_is_not_touched_takes_no_memory_and_all_is_given_back() -> None:
    before = resident_bytes()
    tensor = HugePages().zeros((2**31,), torch.uint8)
    assert resident_bytes() - before < 64 * 2**20
    tensor[: 2**28].fill_(1)
    assert resident_bytes() - before >= 2**28
    del tensor
    gc.collect()
    assert resident_bytes() - before < 64 * 2**20


def test_what_no_machine_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        HugePages().zeros((2**60,), torch.uint8)


def test_weights_keys_and_values_lie_in_them() -> None:
    weight = NativeInt8Ops(threads()).pack(torch.randn(64, 64))
    assert isinstance(weight, NativeWeight)
    assert weight.values is not None
    assert_asked_for(weight.values)
    shape = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=64)
    cache = NativeBackend(threads()).allocate_kv(shape, 4, 16, torch.int8, "cpu")
    assert isinstance(cache, NativeCache)
    assert_asked_for(cache.values)
