"""Blocks of known prefixes: what is found, what is shared, what goes first."""

from __future__ import annotations

import numpy as np

from rollstream.services.engine.model import KvCache
from rollstream.services.engine.prefix_cache import (
    BLOCK_TOKENS,
    Block,
    PrefixCache,
    hidden_states,
    load_blocks,
)
from rollstream.services.engine.weights import ModelConfig

CONFIG = ModelConfig(
    layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, feed_forward=4, vocab=100,
    context=256, rms_eps=1e-5, rope_theta=10000, bos_token=1, eos_token=2,
)
PROMPT = list(range(20))


def computed(tokens: list[int]) -> tuple[KvCache, np.ndarray]:
    """Arrays as a forward pass would leave them, recognisable by token."""
    cache = KvCache(CONFIG, len(tokens))
    values = np.array(tokens, np.float32)
    cache.keys[:, :, : len(tokens)] = values[:, None]
    cache.values[:, :, : len(tokens)] = -values[:, None]
    cache.length = len(tokens)
    return cache, np.repeat(values[:, None], CONFIG.hidden, 1)


def insert(cache: PrefixCache, tokens: list[int]) -> list[Block]:
    return cache.insert(tokens, *computed(tokens))


def known(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return [token for block in cache.match(tokens) for token in block.tokens]


def test_a_prompt_is_found_whole_its_short_tail_included() -> None:
    cache = PrefixCache(10**6)
    insert(cache, PROMPT)
    assert known(cache, PROMPT) == PROMPT
    assert known(cache, [*PROMPT, 77, 78]) == PROMPT
    assert known(cache, [*PROMPT[:18], 77]) == PROMPT[:16]
    assert known(cache, [99, *PROMPT]) == []


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    cache = PrefixCache(10**6)
    first = [*range(8), *[5] * 8]
    second = [*range(50, 58), *[5] * 8]
    ours = insert(cache, first)
    assert known(cache, second) == []
    theirs = insert(cache, second)
    assert [cache.match(first) for _ in range(2)] == [ours, ours]
    assert [cache.match(second) for _ in range(2)] == [theirs, theirs]


def test_a_common_prefix_is_kept_once() -> None:
    cache = PrefixCache(10**6)
    ours = insert(cache, PROMPT)
    size = cache.size_bytes
    theirs = insert(cache, [*PROMPT[:16], 70, 71])
    assert ours[:2] == theirs[:2]
    assert cache.size_bytes == size + theirs[2].size_bytes


def test_loading_gives_back_what_was_computed() -> None:
    cache = PrefixCache(10**6)
    insert(cache, PROMPT)
    blocks = cache.match([*PROMPT, 90])
    loaded = KvCache(CONFIG, 30)
    load_blocks(blocks, loaded)
    original, hidden = computed(PROMPT)
    assert loaded.length == 20
    np.testing.assert_array_equal(loaded.keys[:, :, :20], original.keys[:, :, :20])
    np.testing.assert_array_equal(loaded.values[:, :, :20], original.values[:, :, :20])
    np.testing.assert_array_equal(hidden_states(blocks), hidden)


def test_blocks_do_not_change_with_the_sequence_they_came_from() -> None:
    cache = PrefixCache(10**6)
    kv, hidden = computed(PROMPT)
    cache.insert(PROMPT, kv, hidden)
    kv.keys[:] = 0
    hidden[:] = 0
    assert cache.match(PROMPT)[1].keys.max() == 15
    assert hidden_states(cache.match(PROMPT)).max() == 19


def test_the_longest_unused_goes_first_and_successors_before_their_prefix() -> None:
    block_bytes = insert(PrefixCache(10**6), list(range(BLOCK_TOKENS)))[0].size_bytes
    cache = PrefixCache(3 * block_bytes)
    old = list(range(16))
    insert(cache, old)
    insert(cache, list(range(30, 38)))
    assert known(cache, old) == old
    insert(cache, list(range(60, 68)))  # one too many: the unused 30.. goes
    assert known(cache, old) == old
    assert known(cache, list(range(30, 38))) == []
    insert(cache, list(range(80, 88)))  # 60.. is the longest unused now
    insert(cache, list(range(90, 98)))  # and then the second half of the old one
    assert known(cache, old) == old[:8]
    assert cache.size_bytes <= cache.max_bytes


def test_a_cache_too_small_for_anything_still_hands_out_the_blocks() -> None:
    cache = PrefixCache(0)
    blocks = insert(cache, PROMPT)
    assert [t for block in blocks for t in block.tokens] == PROMPT
    assert (cache.size_bytes, known(cache, PROMPT)) == (0, [])
