"""What was computed for token prefixes, kept for whoever starts with the same tokens.

A chain of blocks of 8 tokens, found by (previous block, tokens); the last block of a prompt may be
shorter, so that siblings and a teacher's request find all of it. A block keeps keys, values and
final hidden states: with these neither sampling nor prompt logprobs run a layer again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from rollstream.services.engine.model import KvCache
from rollstream.services.engine.sequences import PromptScores
from rollstream.services.engine.weights import Floats

BLOCK_TOKENS = 8
_SCORES_BYTES_PER_TOKEN = 20 * 8 + 8


@dataclass(slots=True, eq=False)
class Block:
    """Up to BLOCK_TOKENS tokens after one certain prefix."""

    tokens: tuple[int, ...]
    keys: Floats
    """[layers, kv_heads, tokens, head_dim]"""
    values: Floats
    hidden: Floats
    scores: PromptScores | None = None
    """Of this block's tokens, filled in by whoever first wants prompt logprobs."""
    key: tuple[int, tuple[int, ...]] = (0, ())
    number: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = self.keys.nbytes + self.values.nbytes + self.hidden.nbytes
        return arrays + _SCORES_BYTES_PER_TOKEN * len(self.tokens)


@dataclass(slots=True)
class PrefixCache:
    """At most `max_bytes` of blocks, those not used for longest go first."""

    max_bytes: int
    size_bytes: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    _blocks: OrderedDict[tuple[int, tuple[int, ...]], Block] = field(default_factory=OrderedDict)
    _numbered: int = 0

    def match(self, tokens: list[int]) -> list[Block]:
        """The blocks that cover the longest known prefix of `tokens`."""
        found: list[Block] = []
        at = parent = 0
        while at < len(tokens):
            longest = min(BLOCK_TOKENS, len(tokens) - at)
            block = None
            for length in range(longest, 0, -1):
                block = self._blocks.get((parent, tuple(tokens[at : at + length])))
                if block is not None:
                    break
            if block is None:
                break
            found.append(block)
            at, parent = at + len(block.tokens), block.number
            if len(block.tokens) < BLOCK_TOKENS:
                break  # a short block has no successors
        self._touch(found)
        return found

    def insert(self, tokens: list[int], cache: KvCache, hidden: Floats) -> list[Block]:
        """The blocks that cover `tokens` exactly, made from the sequence's arrays where missing.

        They are good to use even where the cache is too small to keep them.
        """
        chain: list[Block] = []
        parent = 0
        for at in range(0, len(tokens), BLOCK_TOKENS):
            piece = tuple(tokens[at : at + BLOCK_TOKENS])
            block = self._blocks.get((parent, piece))
            if block is None:
                block = self._add((parent, piece), slice(at, at + len(piece)), cache, hidden)
            chain.append(block)
            parent = block.number
        self._touch(chain)
        while self.size_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
        return chain

    def clear(self) -> None:
        """Forgets every block (the weights have changed, or somebody measures)."""
        self._blocks.clear()
        self.size_bytes = 0

    def _add(
        self, key: tuple[int, tuple[int, ...]], where: slice, cache: KvCache, hidden: Floats
    ) -> Block:
        self._numbered += 1
        block = Block(
            tokens=key[1], key=key, number=self._numbered,
            keys=cache.keys[:, :, where].copy(), values=cache.values[:, :, where].copy(),
            hidden=hidden[where].copy(),
        )
        self._blocks[key] = block
        self.size_bytes += block.size_bytes
        return block

    def _touch(self, chain: list[Block]) -> None:
        # Leaves first: a block is never older than its successors, so none is cut off its prefix.
        for block in reversed(chain):
            if block.key in self._blocks:
                self._blocks.move_to_end(block.key)


def load_blocks(blocks: list[Block], cache: KvCache) -> None:
    """Appends the blocks' keys and values to an empty sequence cache."""
    for block in blocks:
        end = cache.length + len(block.tokens)
        cache.keys[:, :, cache.length : end] = block.keys
        cache.values[:, :, cache.length : end] = block.values
        cache.length = end


def hidden_states(blocks: list[Block]) -> Floats:
    """[tokens, hidden] of the blocks one after another."""
    return np.concatenate([block.hidden for block in blocks])
