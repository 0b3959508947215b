"""The frontier never passes what is not done; a hint survives, or is left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.shared.frontier import (
    MAX_HINT_CHARACTERS,
    Frontier,
    Hint,
    decode_hint,
    encode_hint,
)
from rollstream.shared.seen import Seen


@given(st.data())
def test_the_frontier_is_the_first_open_offset(data):
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=40))
    offsets, at = [], 10
    for gap in gaps:
        offsets.append(at)
        at += gap
    frontier = Frontier(10)
    open_, last = set(), 10
    for offset in offsets:
        frontier.add(offset)
        open_.add(offset)
        for done in data.draw(st.lists(st.sampled_from(sorted(open_)), max_size=3)):
            frontier.done(done)
            open_.discard(done)
        expected = min(open_, default=offset + 1)
        assert frontier.position == expected >= last
        last = frontier.position
    assert len(frontier) == len(open_)


def test_reading_backwards_is_refused():
    frontier = Frontier(5)
    frontier.add(7)
    with pytest.raises(ValueError, match="7 read again"):
        frontier.add(7)


@given(st.lists(st.integers(0, 400)), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_hint_comes_back(ordinals, out_position, dispatched_to):
    seen = Seen(1)
    for n in ordinals:
        seen.add_group(n)
    hint = Hint(out_position, seen.state(), dispatched_to, "log")
    assert decode_hint(encode_hint(hint)) == hint


def test_of_a_hint_that_does_not_fit_what_is_seen_is_left_out():
    seen = Seen(1)
    for n in range(1, 200_000, 3):
        seen.add_sample(n, n % 7, 8)
    text = encode_hint(Hint(1, seen.state(), 7, "log"))
    assert len(text) < MAX_HINT_CHARACTERS
    assert decode_hint(text) == Hint(dispatched_to=7, log_id="log")


@pytest.mark.parametrize("text", ["", None, "x", "eJw=", "AAAA", "not base64 at all!"])
def test_foreign_metadata_is_no_hint(text):
    assert decode_hint(text) is None
