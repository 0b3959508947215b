"""The forward pass in numpy: many sequences of any length in one call.

All new tokens of a step are one flat batch for the matrix products; only attention looks at
sequences one by one. Nothing here knows about requests.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from rollstream.services.engine.weights import Floats, ModelConfig, Weights

_GROW_TOKENS = 64


class KvCache:
    """Keys and values of one sequence: `keys[layer, head, token]`, valid up to `length`."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        shape = (config.layers, config.kv_heads, tokens + _GROW_TOKENS, config.head_dim)
        self.keys: Floats = np.empty(shape, np.float32)
        self.values: Floats = np.empty(shape, np.float32)
        self.length = 0

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` in all."""
        if tokens <= self.keys.shape[2]:
            return
        self.keys = self._grown(self.keys, tokens + tokens // 2)
        self.values = self._grown(self.values, tokens + tokens // 2)

    def _grown(self, old: Floats, tokens: int) -> Floats:
        layers, heads, _, dim = old.shape
        new = np.empty((layers, heads, tokens, dim), np.float32)
        new[:, :, : self.length] = old[:, :, : self.length]
        return new


class Chunk(NamedTuple):
    """New tokens of one sequence, to be appended to what its cache already holds."""

    tokens: list[int]
    cache: KvCache


class Model:
    """A Llama-shaped model; calls are not thread-safe for the same caches."""

    def __init__(self, weights: Weights, max_tokens: int, threads: int = 1) -> None:
        self.config = config = weights.config
        self.weights = weights
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "engine-math") if threads > 1 else None
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.arange(max_tokens)[:, None] * frequencies
        self._cos: Floats = np.cos(angles).astype(np.float32)[:, None, :]
        self._sin: Floats = np.sin(angles).astype(np.float32)[:, None, :]

    def forward(self, chunks: list[Chunk]) -> Floats:
        """Final normalised hidden states [all new tokens, hidden]; the caches grow by them.

        Sequences are split over the threads, each with single-threaded products: one meeting of
        the threads a call, so a busy machine costs little.
        """
        for tokens, cache in chunks:
            cache.reserve(cache.length + len(tokens))
        if self._pool is None or len(chunks) < 2:
            return self._forward(chunks)
        parts = _balanced(chunks, self._threads)
        return np.concatenate(list(self._pool.map(self._forward, parts)))

    def logits(self, hidden: Floats) -> Floats:
        """[rows, vocab] of final hidden states [rows, hidden]."""
        if self._pool is None:
            return hidden @ self.weights.head
        out = np.empty((len(hidden), self.config.vocab), np.float32)
        edges = [self.config.vocab * i // self._threads for i in range(self._threads + 1)]

        def part(i: int) -> None:
            columns = slice(edges[i], edges[i + 1])
            np.matmul(hidden, self.weights.head[:, columns], out=out[:, columns])

        list(self._pool.map(part, range(self._threads)))
        return out

    def _forward(self, chunks: list[Chunk]) -> Floats:
        c, eps = self.config, self.config.rms_eps
        heads, kv, dim = c.heads, c.kv_heads, c.head_dim
        ids = np.concatenate([chunk.tokens for chunk in chunks])
        positions = np.concatenate(
            [np.arange(len(tokens)) + cache.length for tokens, cache in chunks]
        )
        cos, sin = self._cos[positions], self._sin[positions]
        attention = _Attention(c, chunks)
        x = np.ascontiguousarray(self.weights.embedding[:, ids].T)
        for number, layer in enumerate(self.weights.layers):
            qkv = (_rms_norm(x, layer.attn_norm, eps) @ layer.qkv).reshape(len(ids), -1, dim)
            rotated = _rotate(qkv[:, : heads + kv], cos, sin)
            mixed = attention(number, rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv :])
            x += mixed @ layer.out
            gate, up = np.hsplit(_rms_norm(x, layer.mlp_norm, eps) @ layer.gate_up, 2)
            x += _silu_times(gate, up) @ layer.down
        for tokens, cache in chunks:
            cache.length += len(tokens)
        return _rms_norm(x, self.weights.norm, eps)


class _Attention:
    """Causal grouped-query attention of one step's chunks over their caches, layer by layer."""

    def __init__(self, config: ModelConfig, chunks: list[Chunk]) -> None:
        self._config = config
        self._scale = np.float32(config.head_dim**-0.5)
        self._places: list[tuple[KvCache, int, int, int, Floats]] = []
        self._singles: list[tuple[KvCache, int, int]] = []
        row = 0
        for tokens, cache in chunks:
            end = cache.length + len(tokens)
            if len(tokens) == 1:
                self._singles.append((cache, row, end))
            else:
                mask = np.triu(
                    np.full((len(tokens), end), -np.inf, np.float32), cache.length + 1
                )
                self._places.append((cache, row, row + len(tokens), end, mask))
            row += len(tokens)
        if self._singles:
            # Rows shorter than the longest stay -inf at their end in every layer.
            longest = max(end for _, _, end in self._singles)
            groups = config.heads // config.kv_heads
            shape = (len(self._singles), config.kv_heads, groups, longest)
            self._scores = np.full(shape, -np.inf, np.float32)
            self._shares = np.empty(shape, np.float32)

    def __call__(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads * dim]."""
        c = self._config
        groups = c.heads // c.kv_heads
        q = (q * self._scale).reshape(len(q), c.kv_heads, groups, c.head_dim)
        out = np.empty(q.shape, np.float32)
        for cache, start, stop, end, mask in self._places:
            keys, values = cache.keys[layer, :, :end], cache.values[layer, :, :end]
            keys[:, cache.length :] = k[start:stop].swapaxes(0, 1)
            values[:, cache.length :] = v[start:stop].swapaxes(0, 1)
            rows = q[start:stop].transpose(1, 2, 0, 3)  # [kv_heads, groups, tokens, dim]
            scores = rows @ keys[:, None].swapaxes(-1, -2) + mask
            np.exp(scores - scores.max(-1, keepdims=True), out=scores)
            shares = scores / scores.sum(-1, keepdims=True)
            out[start:stop] = (shares @ values[:, None]).transpose(2, 0, 1, 3)
        if self._singles:
            self._attend_singles(layer, q, k, v, out)
        return out.reshape(len(q), -1)

    def _attend_singles(self, layer: int, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
        """Decoding rows: one softmax for all; matvec is a third faster than thin products."""
        scores, shares = self._scores, self._shares
        for i, (cache, row, end) in enumerate(self._singles):
            keys = cache.keys[layer, :, :end]
            keys[:, -1] = k[row]
            cache.values[layer, :, end - 1] = v[row]
            np.matvec(keys[:, None], q[row], out=scores[i, :, :, :end])
        np.subtract(scores, scores.max(-1, keepdims=True), out=shares)
        np.exp(shares, out=shares)
        shares /= shares.sum(-1, keepdims=True)
        for i, (cache, row, end) in enumerate(self._singles):
            np.vecmat(shares[i, :, :, :end], cache.values[layer, :, None, :end], out=out[row])


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    mean_square = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
    return x * (1 / np.sqrt(mean_square + np.float32(eps)))[:, None] * weight


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    np.subtract(first * cos, second * sin, out=out[..., :half])
    np.add(second * cos, first * sin, out=out[..., half:])
    return out


def _silu_times(gate: Floats, up: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp of a large -gate is inf, and gate / inf is 0
        scale = np.exp(-gate)
    scale += 1
    np.divide(gate, scale, out=scale)
    scale *= up
    return scale


def _balanced(chunks: list[Chunk], parts: int) -> list[list[Chunk]]:
    """The chunks, in order, in up to `parts` runs of about as many tokens each."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    runs: list[list[Chunk]] = [[]]
    done = 0
    for chunk in chunks:
        if runs[-1] and done >= total * len(runs) / parts:
            runs.append([])
        runs[-1].append(chunk)
        done += len(chunk.tokens)
    return runs
