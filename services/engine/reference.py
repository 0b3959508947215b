"""The same model the slow and obvious way, to hold the fast one to.

One sequence, no cache, no batch, no threads, float64: every position is computed from scratch.
Nothing of `model` is used here, on purpose.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollstream.services.engine.weights import Weights

Array = NDArray[np.float64]


def reference_logprobs(weights: Weights, tokens: list[int]) -> Array:
    """[tokens, vocab]: row t is the log-probability of every token that could come after t."""
    c = weights.config
    x = weights.embedding[:, tokens].T.astype(np.float64)
    for layer in weights.layers:
        x = x + _attention(weights, layer.qkv, layer.out, _norm(x, layer.attn_norm, c.rms_eps))
        gate_up = _norm(x, layer.mlp_norm, c.rms_eps) @ layer.gate_up.astype(np.float64)
        gate, up = gate_up[:, : c.feed_forward], gate_up[:, c.feed_forward :]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.astype(np.float64)
    logits = _norm(x, weights.norm, c.rms_eps) @ weights.head.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _attention(weights: Weights, qkv: NDArray, out: NDArray, x: Array) -> Array:
    c = weights.config
    count, dim = len(x), c.head_dim
    heads = (x @ qkv.astype(np.float64)).reshape(count, c.heads + 2 * c.kv_heads, dim)
    future = np.triu(np.ones((count, count), bool), 1)
    results = []
    for head in range(c.heads):
        kv = head // (c.heads // c.kv_heads)
        q = _rope(heads[:, head], c.rope_theta)
        k = _rope(heads[:, c.heads + kv], c.rope_theta)
        v = heads[:, c.heads + c.kv_heads + kv]
        scores = q @ k.T / np.sqrt(dim)
        scores[future] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        results.append(shares / shares.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(results, axis=1) @ out.astype(np.float64)


def _rope(x: Array, theta: float) -> Array:
    """Turns dimension pair (i, i + dim/2) of the token at t by t * theta^(-2i/dim), as complex."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _norm(x: Array, weight: NDArray, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight
