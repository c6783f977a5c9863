"""The Triton backend: one unified launch of paged attention a layer, on CUDA.

Owns the cache's layout, [layers, blocks, kv_heads, block_tokens, head_dim], and the launches of
what kernels/triton/device/ computes; kernels/select.py offers it by name. All it launches follows
from the host's integers, so that nothing waits for the device and a graph can be captured. On a
CPU it serves under Triton's interpreter alone, for tests.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.base import AttentionBatch, AttentionShape, Cache, HeadNorms, Prepared, type_name
from kernels.triton import launch
from kernels.triton.device import attention
from kernels.triton.device import cache as cache_kernels

LOG2_E = 1.4426950408889634
INTERPRETER = launch.Device(name="interpreter", processors=2, shared_bytes=2**16)
HEAD_DIM_MAX = 256
HEADS_AT_ONCE = 8
"""Heads that one program turns and stores."""


@dataclass(frozen=True, slots=True)
class TritonCache:
    """Keys and values, [layers, blocks, kv_heads, block_tokens, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    shape: AttentionShape


@dataclass(frozen=True, slots=True)
class _Prepared:
    batch: AttentionBatch
    launch: launch.AttentionLaunch


class TritonBackend:
    """Attention through our Triton kernels, launched as it suits `device`, by default its own.

    A sweep gives the tiles to be tried; else they are what is best known.
    """

    name = "triton"

    def __init__(
        self, device: launch.Device | None = None, tiles: launch.Tiles | None = None
    ) -> None:
        self._device = device
        self._tiles = tiles

    def supports(
        self, shape: AttentionShape, device: str, dtype: torch.dtype, block_tokens: int
    ) -> str | None:
        """Return None, or why not."""
        if device != "cuda" and not triton.knobs.runtime.interpret:
            return f"runs on CUDA, not on {device}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"does not compute in {type_name(dtype)}"
        if shape.head_dim % 8 or shape.head_dim > HEAD_DIM_MAX:
            return f"head dimension {shape.head_dim} is not 8, 16, ... {HEAD_DIM_MAX}"
        if shape.heads // shape.kv_heads > 64:
            return f"{shape.heads // shape.kv_heads} query heads share a key head"
        if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            return "needs compute capability 8.0 or later"
        return None

    def allocate_kv(
        self,
        shape: AttentionShape,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: str,
    ) -> Cache:
        """Return a zeroed cache."""
        size = (shape.layers, blocks, shape.kv_heads, block_tokens, shape.head_dim)
        keys = torch.zeros(size, dtype=dtype, device=device)
        return TritonCache(keys, torch.zeros_like(keys), shape)

    def clear_blocks(self, cache: Cache, blocks: list[int]) -> None:
        """Zero these blocks."""
        assert isinstance(cache, TritonCache)
        rows = torch.tensor(blocks, device=cache.keys.device)
        cache.keys[:, rows] = 0
        cache.values[:, rows] = 0

    def launch_key(self, batch: AttentionBatch, cache: Cache) -> tuple[int, ...]:
        """Return every integer that the launches of this batch take."""
        assert isinstance(cache, TritonCache)
        return (*self._launch(batch, cache).key(), batch.block_tables.stride(0))

    def prepare(self, batch: AttentionBatch, cache: Cache) -> Prepared:
        """Choose the launch: the device's own tensors are read by the kernels alone."""
        assert isinstance(cache, TritonCache)
        return _Prepared(batch, self._launch(batch, cache))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Write k, v into the cache, then attend."""
        assert isinstance(cache, TritonCache)
        assert isinstance(prepared, _Prepared)
        shape, keys = cache.shape, cache.keys[layer]
        cache_kernels.store_kv[(len(k),)](
            k, v, keys, cache.values[layer], prepared.batch.slot_mapping,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
            KV_HEADS=shape.kv_heads, HEAD_LINES=launch.power_of_two(shape.kv_heads),
            HEAD_DIM=shape.head_dim, WIDTH=launch.width_of(shape.head_dim),
            BLOCK_TOKENS=keys.shape[2],
        )  # fmt: skip
        return _attend(layer, q, cache, prepared)

    def attend_qkv(
        self,
        layer: int,
        qkv: torch.Tensor,
        turns: torch.Tensor,
        norms: HeadNorms | None,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Norm and turn heads, write keys and values, attend; qkv and turns are contiguous."""
        assert isinstance(cache, TritonCache)
        assert isinstance(prepared, _Prepared)
        assert qkv.is_contiguous()
        assert turns.is_contiguous()
        shape, keys = cache.shape, cache.keys[layer]
        q = qkv.new_empty((len(qkv), shape.heads, shape.head_dim))
        heads = shape.heads + 2 * shape.kv_heads
        cache_kernels.turn_and_store[(len(qkv), -(-heads // HEADS_AT_ONCE))](
            q, qkv, turns, norms.query if norms else qkv, norms.key if norms else qkv, keys,
            cache.values[layer], prepared.batch.slot_mapping, norms.eps if norms else 0.0,
            keys.stride(0), keys.stride(1), HEADS=shape.heads, KV_HEADS=shape.kv_heads,
            HEAD_LINES=HEADS_AT_ONCE, HEAD_DIM=shape.head_dim,
            WIDTH=launch.width_of(shape.head_dim), BLOCK_TOKENS=keys.shape[2],
            NORMED=norms is not None,
        )  # fmt: skip
        return _attend(layer, q, cache, prepared)

    def _launch(self, batch: AttentionBatch, cache: TritonCache) -> launch.AttentionLaunch:
        block_tokens, shape = cache.keys.shape[3], cache.shape
        device = self._device or device_of(cache.keys.device)
        counts = batch.query_lengths_host
        tiles = self._tiles or launch.attention_tiles(
            shape,
            device,
            item_bytes=cache.keys.element_size(),
            block_tokens=block_tokens,
            decode=max(counts) == 1,
        )
        return launch.attention_launch(
            shape,
            tiles,
            device.processors,
            query_lengths=counts,
            table_tokens=batch.block_tables.shape[1] * block_tokens,
        )


def device_of(device: torch.device) -> launch.Device:
    """Return what launches must know of a GPU, or of the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack what we ask
    return launch.Device(
        name=properties.name,
        processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )


def _attend(layer: int, q: torch.Tensor, cache: TritonCache, prepared: _Prepared) -> torch.Tensor:
    batch, step, shape = prepared.batch, prepared.launch, cache.shape
    keys, window = cache.keys[layer], shape.window(layer)
    width, group = launch.width_of(shape.head_dim), shape.heads // shape.kv_heads
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    factor = LOG2_E if shape.cap is None else 2 * LOG2_E / shape.cap
    out = q.new_empty((len(q), shape.heads, shape.head_dim))
    lines = step.rows * shape.heads * step.segments if step.segments > 1 else 0
    parts = q.new_empty((lines, width), dtype=torch.float32)
    largest, totals = parts.new_empty(2, lines)
    attention.paged_attention[(step.blocks, shape.kv_heads, step.segments)](
        out, parts, largest, totals, q, keys, cache.values[layer], batch.block_tables,
        batch.context_lengths, batch.query_starts, scale * factor, (shape.cap or 0.0) * LOG2_E,
        window, step.rows, step.segments, step.part_tiles, batch.block_tables.stride(0),
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), HEADS=shape.heads, GROUP=group,
        HEAD_DIM=shape.head_dim, WIDTH=width, BLOCK_TOKENS=keys.shape[2], TILE=step.tiles.tile,
        BLOCK_M=step.tiles.block_m, CAPPED=shape.cap is not None, WINDOWED=window > 0,
        DECODE=bool(step.decode), SPLIT=step.segments > 1, num_warps=step.tiles.warps,
        num_stages=step.tiles.stages,
    )  # fmt: skip
    if step.segments > 1:
        attention.combine_parts[(step.rows, shape.kv_heads)](
            out, parts, largest, totals, batch.context_lengths, batch.query_starts, window,
            step.segments, step.part_tiles, HEADS=shape.heads, GROUP=group,
            GROUP_LINES=launch.power_of_two(group), HEAD_DIM=shape.head_dim, WIDTH=width,
            TILE=step.tiles.tile, WINDOWED=window > 0,
        )  # fmt: skip
    return out
