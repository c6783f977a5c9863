"""The decoder, eager, on a packed step: embedding, layers, norm, head.

Owns the order of a forward pass; engine/runner.py calls it. Every product and every attention goes
through the kernel seam. Knows no request and no scheduler: a step is a pack of tokens, and only
the tokens that are to be sampled or scored pass through the head.
"""

from collections.abc import Callable
from functools import partial

import torch

from kernels.base import (
    AttentionBackend,
    Cache,
    DecoderWeights,
    FusedBackend,
    HeadNorms,
    Ops,
    Prepared,
    StepBackend,
    StepBatch,
)

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Float32 logits [S, vocabulary] of S of a step's tokens, by their places in the pack."""


class Decoder:
    """A decoder over a backend's paged cache: a llama (Touvron et al., 2023), or what weights add.

    beat is called at each layer: a long step that goes on is no hang.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        backend: AttentionBackend,
        ops: Ops,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
        self._weights = weights
        self._backend = backend
        self._ops = ops
        whole = isinstance(backend, StepBackend) and backend.serves(weights)
        self._fused = backend if isinstance(backend, FusedBackend) else None
        self._stepper = backend if whole and isinstance(backend, StepBackend) else None

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """Compute the step, fill the cache; return float32 logits [S, vocabulary]."""
        return self.forward_all(batch, cache)[0]

    def forward_all(self, batch: StepBatch, cache: Cache) -> tuple[torch.Tensor, LogitsOf]:
        """Compute the step; return its logits, and what gives those of others of its tokens.

        These need not exist all at one time; they can be had until the next step.
        """
        if self._stepper:
            self._beat()
            logits = self._stepper.step(self._weights, batch, cache, self._beat)
            return logits.float(), partial(self._stepper.logits_of, self._weights)
        logits_of = partial(self.logits, self.hidden(batch, cache))
        return logits_of(batch.sample_tokens), logits_of

    def hidden(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """Compute the step, fill the cache; return what the head reads of each token [T, hidden].

        Layer by layer, each op by itself.
        """
        weights, ops, eps = self._weights, self._ops, self._weights.norm_eps
        prepared = self._backend.prepare(batch.attention, cache)
        turns = self._turns(batch.positions)
        residual = weights.embedding.index_select(0, batch.input_ids)
        if weights.embedding_scale != 1.0:
            residual *= weights.embedding_scale
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for number, layer in enumerate(weights.layers):
            self._beat()
            attended = self._attended(number, normed, turns[number], cache, prepared)
            mixed = ops.linear(attended.reshape(len(normed), -1), layer.output)
            mixed = self._out(mixed, layer.output_bias, layer.attention_out_norm)
            normed, residual = ops.add_rms_norm(mixed, residual, layer.post_norm, eps)
            fed = ops.linear(self._gated(ops.linear(normed, layer.gate_up)), layer.down)
            fed = self._out(fed, None, layer.feed_out_norm)
            normed, residual = ops.add_rms_norm(fed, residual, self._norm_after(number), eps)
        return normed

    def _turns(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return each layer's turns of the step's tokens [T, head_dim / 2, 2]."""
        weights = self._weights
        turns = weights.rotations.index_select(0, positions)
        if weights.local_rotations is None:
            return [turns] * len(weights.layers)
        local = weights.local_rotations.index_select(0, positions)
        windows = map(weights.shape.window, range(len(weights.layers)))
        return [local if window else turns for window in windows]

    def _attended(
        self,
        number: int,
        normed: torch.Tensor,
        turns: torch.Tensor,
        cache: Cache,
        prepared: Prepared,
    ) -> torch.Tensor:
        """Return the attention of a layer [T, heads, head_dim] before its output product."""
        layer, shape, eps = (
            self._weights.layers[number],
            self._weights.shape,
            self._weights.norm_eps,
        )
        qkv = self._ops.linear(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        qkv = qkv.view(len(normed), -1, shape.head_dim)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(query=layer.query_norm, key=layer.key_norm, eps=eps)
        if self._fused:
            return self._fused.attend_qkv(number, qkv, turns, norms, cache, prepared)
        q, k, v = self._turned(qkv, turns, norms)
        return self._backend.attend(number, q, k, v, cache, prepared)

    def _turned(
        self, qkv: torch.Tensor, turns: torch.Tensor, norms: HeadNorms | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, normed and turned, and values: [T, heads, head_dim] each."""
        shape, ops = self._weights.shape, self._ops
        heads, turned_heads = shape.heads, shape.heads + shape.kv_heads
        to_turn = qkv[:, :turned_heads]
        if norms is not None:
            queries = ops.rms_norm(qkv[:, :heads], norms.query, norms.eps)
            keys = ops.rms_norm(qkv[:, heads:turned_heads], norms.key, norms.eps)
            to_turn = torch.cat([queries, keys], dim=1)
        turned = ops.rope(to_turn, turns)
        return turned[:, :heads], turned[:, heads:], qkv[:, turned_heads:]

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._weights.activation == "silu":
            return self._ops.silu_multiply(gate_up)
        return self._ops.gelu_multiply(gate_up)

    def _out(
        self, added: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what attention or feed-forward adds to the residual, as a family wants it."""
        if bias is not None:
            added += bias
        return added if norm is None else self._ops.rms_norm(added, norm, self._weights.norm_eps)

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, vocabulary] of S tokens of the pack."""
        if not len(tokens):
            return hidden.new_empty((0, len(self._weights.embedding)), dtype=torch.float32)
        logits = self._ops.linear(hidden.index_select(0, tokens), self._weights.head).float()
        cap = self._weights.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _norm_after(self, layer: int) -> torch.Tensor:
        """Return the norm that follows a layer: the next layer's first, or the final one."""
        layers = self._weights.layers
        return layers[layer + 1].input_norm if layer + 1 < len(layers) else self._weights.final_norm
