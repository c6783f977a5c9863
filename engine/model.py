"""The llama decoder, eager, on a packed step: embedding, layers, norm, head.

Owns the order of a forward pass; engine/runner.py calls it. Every product and every attention goes
through the kernel seam. Knows no request and no scheduler: a step is a pack of tokens, and only
the tokens that are to be sampled or scored pass through the head.
"""

from collections.abc import Callable

import torch

from kernels.base import AttentionBackend, Cache, DecoderWeights, Ops, StepBackend, StepBatch


class Decoder:
    """A llama-type decoder over a backend's paged cache (Touvron et al., 2023).

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
        self._stepper = backend if whole and isinstance(backend, StepBackend) else None

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """Compute the step, fill the cache; return float32 logits [S, vocabulary]."""
        if self._stepper:
            self._beat()
            return self._stepper.step(self._weights, batch, cache, self._beat).float()
        return self.logits(self.hidden(batch, cache), batch.sample_tokens)

    def hidden(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """Compute the step, fill the cache; return what the head reads of each token [T, hidden].

        For steps that want logits of many tokens: these need not exist all at one time.
        """
        weights, ops, eps = self._weights, self._ops, self._weights.norm_eps
        heads = weights.shape.heads
        turned_heads = heads + weights.shape.kv_heads
        prepared = self._backend.prepare(batch.attention, cache)
        turns = weights.rotations.index_select(0, batch.positions)
        residual = weights.embedding.index_select(0, batch.input_ids)
        normed = ops.rms_norm(residual, weights.layers[0].input_norm, eps)
        for number, layer in enumerate(weights.layers):
            self._beat()
            qkv = ops.linear(normed, layer.qkv).view(len(normed), -1, weights.shape.head_dim)
            turned = ops.rope(qkv[:, :turned_heads], turns)
            q, k, v = turned[:, :heads], turned[:, heads:], qkv[:, turned_heads:]
            attended = self._backend.attend(number, q, k, v, cache, prepared)
            mixed = ops.linear(attended.reshape(len(normed), -1), layer.output)
            normed, residual = ops.add_rms_norm(mixed, residual, layer.post_norm, eps)
            fed = ops.linear(ops.silu_multiply(ops.linear(normed, layer.gate_up)), layer.down)
            normed, residual = ops.add_rms_norm(fed, residual, self._norm_after(number), eps)
        return normed

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [S, vocabulary] of S tokens of the pack."""
        if not len(tokens):
            return hidden.new_empty((0, len(self._weights.embedding)), dtype=torch.float32)
        return self._ops.linear(hidden.index_select(0, tokens), self._weights.head).float()

    def _norm_after(self, layer: int) -> torch.Tensor:
        """Return the norm that follows a layer: the next layer's first, or the final one."""
        layers = self._weights.layers
        return layers[layer + 1].input_norm if layer + 1 < len(layers) else self._weights.final_norm
